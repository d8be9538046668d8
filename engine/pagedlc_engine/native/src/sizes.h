// Sizes that Python must know, too: pagedlc_engine/native/compiler.py has the values and what they mean.
#pragma once

namespace pagedlc {

constexpr int GROUP = PAGEDLC_GROUP;
constexpr int PANEL = PAGEDLC_PANEL;
constexpr int MOST_QUERIES = PAGEDLC_MOST_QUERIES;
constexpr int MOST_HEAD_DIM = PAGEDLC_MOST_HEAD_DIM;

}  // namespace pagedlc
