// What a test asserts: a condition that does not hold is told on stderr and counted.
#pragma once

#include <atomic>
#include <cstdio>

inline std::atomic<int> failures{0};

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      ++failures;                                                                    \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);   \
    }                                                                                \
  } while (0)

#define CHECK_LESS(a, b)                                                                                        \
  do {                                                                                                          \
    const auto one = static_cast<double>(a), other = static_cast<double>(b);                                    \
    if (!(one <= other)) {                                                                                      \
      ++failures;                                                                                               \
      std::fprintf(stderr, "%s:%d: %s <= %s: %g is more than %g\n", __FILE__, __LINE__, #a, #b, one, other);    \
    }                                                                                                           \
  } while (0)
