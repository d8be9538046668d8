"""The channel between an engine's process and the user's: nothing is lost, nobody waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from pagedlc_engine.process.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = map(Channel, socket.socketpair())
    yield left, right
    for end in (left, right):
        end.close()
        list(end)


def test_messages_arrive_in_order_from_any_number_of_threads(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    large = bytes(100_000)  # some go at once, some must wait for the reader

    def send(sender: int) -> None:
        for number in range(50):
            left.send((sender, number, large if number % 7 == 0 else b""))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    incoming = iter(right)
    found = [next(incoming)[:2] for _ in range(200)]
    for thread in threads:
        thread.join(20)
    for sender in range(4):
        assert [number for origin, number in found if origin == sender] == list(range(50))


def test_sending_does_not_wait_for_a_reader(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    batches: list[int] = []

    def counting(batch: list[object]) -> list[object]:
        batches.append(len(batch))
        return batch

    left._encode = counting
    for _ in range(300):
        left.send(bytes(50_000))
    incoming = iter(right)
    assert sum(len(next(incoming)) for _ in range(300)) == 300 * 50_000
    assert len(batches) < 100  # what gathered went together


def test_what_was_sent_before_a_flush_arrives(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    for number in range(40):
        left.send((number, bytes(50_000)))
    reader: list[int] = []
    thread = threading.Thread(target=lambda: reader.extend(number for number, _ in right))
    thread.start()
    left.flush(20)
    left.close()
    thread.join(20)
    assert reader == list(range(40))


def test_closing_ends_both_sides_and_sending_afterwards_is_harmless(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    thread = threading.Thread(target=lambda: list(left))
    thread.start()
    left.send("last")
    left.close()
    assert list(right) == ["last"]
    thread.join(20)
    assert not thread.is_alive()
    left.send("lost")
    right.send("lost")


class SendsWhilePickled:
    """As a garbage collection may in the middle of a message: it ends requests that nobody holds any more."""

    def __init__(self, channel: Channel, messages: list[str]) -> None:
        self._channel = channel
        self._messages = messages

    def __reduce__(self) -> tuple[object, ...]:
        for message in self._messages:
            self._channel.send(message)
        return str, ("outer",)


def test_a_message_sent_in_the_middle_of_another_follows_it(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    sender = threading.Thread(target=left.send, args=(SendsWhilePickled(left, ["a", "b"]),), daemon=True)
    sender.start()
    sender.join(20)
    assert not sender.is_alive()
    incoming = iter(right)
    assert [next(incoming) for _ in range(3)] == ["outer", "a", "b"]
    left.send("next")
    assert next(incoming) == "next"


def test_what_cannot_be_pickled_is_the_senders_error(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    with pytest.raises(Exception, match=r"lambda|pickle"):
        left.send(lambda: None)
    left.send("next")
    assert next(iter(right)) == "next"
