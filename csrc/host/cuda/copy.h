// Moving bytes.
#pragma once

#include <cstddef>

namespace graphshard::hostcuda {

/// Copy `num_bytes`, which must not overlap. Small copies leave what they wrote in the cache, where the reader finds
/// it; large ones, which would only push it out again, write past the cache.
void copy_bytes(char* destination, const char* source, size_t num_bytes);

}  // namespace graphshard::hostcuda
