// What the C++ tests check with: a failure is printed and ends the process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace graphshard {

inline void require(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::abort();
}

// `use` must throw an Error whose text contains `part`.
template <typename Error, typename Use>
void require_error(const Use& use, const std::string& part) {
  try {
    use();
  } catch (const Error& error) {
    const bool is_right = std::string(error.what()).find(part) != std::string::npos;
    if (!is_right) std::fprintf(stderr, "the error was: %s\n", error.what());
    require(is_right, part.c_str());
    return;
  }
  require(false, ("no error: " + part).c_str());
}

}  // namespace graphshard
