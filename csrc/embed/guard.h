// Exceptions become statuses at the border of the C API.
#pragma once

#include "embed/step_abi.h"

namespace graphshard {

// The status of the exception that is being handled; its text goes to `error`.
gs_status status_of_exception(ErrorText* error);

template <typename Function>
gs_status guarded(ErrorText* error, const Function& function) {
  try {
    return function();
  } catch (...) {
    return status_of_exception(error);
  }
}

// Seconds as nanoseconds; std::invalid_argument if they are not finite or negative.
int64_t timeout_ns(double timeout_s);

}  // namespace graphshard
