// Sums of elements over ranks, in rank order: the same bits wherever they are made.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphshard::hostnccl {

/// Bytes an element of NCCL's `data_type` has; 0 for a type that is not known here.
size_t bytes_of_type(int data_type);
bool can_reduce(int data_type);

/// `destination[i] = sum of source[rank * num_elements + i]`, in float32, rounded once to nearest even.
void sum_ranks(void* destination, const void* source, size_t num_elements, int num_ranks, int data_type);

}  // namespace graphshard::hostnccl
