// Python callables as host functions: threads that keep their thread state, errors that are kept, a quiet end.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>
#include <vector>

#include "runtime/calls.h"

namespace graphshard {

// Python's lock released for a scope, as nanobind::gil_scoped_release, but with a quiet end for daemon threads.
class ReleasedGil {
 public:
  ReleasedGil();
  ~ReleasedGil();
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// `functions` are Python callables or (address of a `void (*)(void*)`, its argument) pairs.
// `errors` is where their exceptions go; a new place if it is null.
std::shared_ptr<Calls> make_calls(const nanobind::sequence& functions, std::shared_ptr<CallErrors> errors = nullptr);

// Enqueueing of one callable; its error goes to `errors`.
struct OneCall {
  PyObject* callable;
  std::shared_ptr<CallErrors> errors;
};
// Host function for a heap-allocated OneCall, which it frees.
void run_one_call(void* one_call);

// Keeps `object` alive until the last copy is gone, on whatever thread that happens.
std::shared_ptr<const void> keep_object(const nanobind::handle& object);

// To be called once, when the module is made: registers the end of the interpreter.
void prepare_python_calls();

}  // namespace graphshard
