// What the files of the Python module share. Its surface and contracts are in graphshard/_core.pyi.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "driver/table.h"
#include "python_calls.h"
#include "runtime/collective.h"

namespace graphshard {

namespace nb = nanobind;
using namespace nb::literals;

// One function per bindings_*.cpp.
void bind_device(nb::module_& m);   // drivers, memory, streams, events
void bind_lists(nb::module_& m);    // calls, op lists, graphs
void bind_embed(nb::module_& m);    // steps for servers
void bind_control(nb::module_& m);  // words, control pages
void bind_nccl(nb::module_& m);     // NCCL libraries, communicators

constexpr int64_t kSignalSliceNs = 100'000'000;

inline void check_timeout(double timeout_s) {
  if (timeout_s >= 0.0 && std::isfinite(timeout_s)) return;
  throw nb::value_error("timeout_s is a finite number of seconds, 0 or more: waits are never unbounded");
}

// Waits in slices without the GIL, so that Ctrl-C is answered. `wait` takes nanoseconds and says whether it is over.
template <typename Wait>
bool wait_bounded(double timeout_s, const Wait& wait) {
  check_timeout(timeout_s);
  auto left_ns = static_cast<int64_t>(std::min(timeout_s * 1e9, 9e18));
  while (true) {
    const int64_t slice_ns = std::min(left_ns, kSignalSliceNs);
    {
      const ReleasedGil released;
      if (wait(slice_ns)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    left_ns -= slice_ns;
    if (left_ns <= 0) return false;
  }
}

// Value words are 32 bits; -1 is a value too.
inline uint32_t word(nb::handle value) {
  const auto wide = nb::cast<int64_t>(value);
  if (wide < INT32_MIN || wide > UINT32_MAX) throw nb::value_error("a value word has 32 bits");
  return static_cast<uint32_t>(wide);
}

// ("write" | "wait" | "wait_equal", address, value)
inline CUstreamBatchMemOpParams value_op(const nb::tuple& fields) {
  if (nb::len(fields) != 3) throw nb::value_error("a value of a batch is (kind, address, value)");
  const auto kind = nb::cast<std::string>(fields[0]);
  const auto address = nb::cast<CUdeviceptr>(fields[1]);
  CUstreamBatchMemOpParams op{};
  if (kind == "write") {
    op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op.writeValue.address = address;
    op.writeValue.value = word(fields[2]);
    op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  } else if (kind == "wait" || kind == "wait_equal") {
    op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    op.waitValue.address = address;
    op.waitValue.value = word(fields[2]);
    op.waitValue.flags = kind == "wait" ? CU_STREAM_WAIT_VALUE_GEQ : CU_STREAM_WAIT_VALUE_EQ;
  } else {
    throw nb::value_error(("a value of a batch is write, wait or wait_equal, not " + kind).c_str());
  }
  return op;
}

// The other way round.
inline nb::tuple value_fields(const CUstreamBatchMemOpParams& op) {
  if (op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
    return nb::make_tuple("write", op.writeValue.address, op.writeValue.value);
  }
  const bool is_equal = op.waitValue.flags == CU_STREAM_WAIT_VALUE_EQ;
  return nb::make_tuple(is_equal ? "wait_equal" : "wait", op.waitValue.address, op.waitValue.value);
}

// An element type by torch's name for it.
inline ElementType element_type(const std::string& name) {
  if (name == "float16") return ElementType::kFloat16;
  if (name == "float32") return ElementType::kFloat32;
  if (name == "bfloat16") return ElementType::kBfloat16;
  throw nb::value_error(("dtype '" + name + "' is unknown: float16, float32, bfloat16").c_str());
}

}  // namespace graphshard
