// Threads that go through a step together.
#pragma once

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedlc {

static inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

constexpr int SPINS = 1000;  // some ten microseconds

// Waits for `ready`: spins a little, then lets other threads run in between.
template <class Ready>
static inline void wait_until(Ready ready) {
    for (int spins = 0; !ready(); spins++) {
        if (spins < SPINS)
            pause_briefly();
        else
            std::this_thread::yield();
    }
}

// A piece of work cut into chunks. Who has time takes the next ones: a thread that the system has put aside holds up
// nobody but for the chunks it has in hand.
struct alignas(64) Phase {
    std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
};

class Team;

// One thread's way through the phases of a step.
class Walk {
public:
    explicit Walk(Team& team) : team_(team) {}

    // Does work(chunk) for every chunk below `count`, all threads together; returns when all are done.
    template <class Work>
    void share(int64_t count, Work work);

private:
    Team& team_;
    size_t phase_ = 0;
};

class Team {
public:
    // `phases` is the most that one step has. Where the system gives fewer threads, fewer work.
    Team(int threads, int phases) : phases_(phases) {
        try {
            for (int i = 1; i < threads; i++) workers_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
        }
    }

    ~Team() {
        stop_ = true;
        turn_.fetch_add(1);
        turn_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Runs step(walk) on all threads; returns when the step is done. A thread that comes too late is not waited for.
    template <class Step>
    void run(const Step& step) {
        step_ = &step;
        call_ = [](const void* known, Walk& walk) { (*static_cast<const Step*>(known))(walk); };
        inside_ = 0;
        turn_.fetch_add(1);
        turn_.notify_all();
        Walk walk(*this);
        step(walk);
        wait_until([this] {
            int nobody = 0;
            return inside_.compare_exchange_strong(nobody, CLOSED);
        });
        for (Phase& phase : phases_) phase.next = 0, phase.done = 0;
    }

private:
    friend class Walk;
    static constexpr int CLOSED = -1;

    void serve() {
        for (uint32_t seen = 0;;) {
            for (int spins = 0; spins < SPINS && turn_ == seen; spins++) pause_briefly();
            turn_.wait(seen);
            seen = turn_;
            if (stop_) return;
            if (!enter()) continue;
            Walk walk(*this);
            call_(step_, walk);
            inside_.fetch_sub(1);
        }
    }

    bool enter() {
        int inside = inside_;
        while (inside != CLOSED)
            if (inside_.compare_exchange_weak(inside, inside + 1)) return true;
        return false;
    }

    std::vector<Phase> phases_;
    const void* step_ = nullptr;
    void (*call_)(const void*, Walk&) = nullptr;
    std::atomic<int> inside_{CLOSED};
    std::atomic<uint32_t> turn_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

template <class Work>
void Walk::share(int64_t count, Work work) {
    Phase& phase = team_.phases_[phase_++];
    int64_t next = phase.next.load(std::memory_order_relaxed);
    while (next < count) {
        // Large shares first, so that few are fetched; small ones last, so that all threads end together.
        int64_t size = (count - next) / (2 * team_.threads());
        int64_t end = next + (size > 0 ? size : 1);
        if (!phase.next.compare_exchange_weak(next, end, std::memory_order_relaxed)) continue;
        for (int64_t chunk = next; chunk < end; chunk++) work(chunk);
        phase.done.fetch_add(end - next, std::memory_order_release);
        next = phase.next.load(std::memory_order_relaxed);
    }
    wait_until([&] { return phase.done.load(std::memory_order_acquire) >= count; });
}

}  // namespace pagedlc
