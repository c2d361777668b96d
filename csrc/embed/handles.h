// What the handles of the C API are, and this thread's last error.
#pragma once

#include "embed/guard.h"

struct gs_driver {
  graphshard::Driver* driver;
};

struct gs_memory {
  std::shared_ptr<graphshard::Memory> memory;
};

struct gs_stream {
  std::shared_ptr<graphshard::Stream> stream;
};

struct gs_list {
  graphshard::Driver* driver;
  std::shared_ptr<graphshard::Stream> origin;
  std::shared_ptr<graphshard::OpList> list;
  std::shared_ptr<graphshard::Calls> calls;
};

struct gs_order {
  std::shared_ptr<graphshard::StepOrder> order;
};

namespace graphshard {

// This thread's.
ErrorText& last_error();

template <typename Function>
gs_status api(const Function& function) {
  return guarded(&last_error(), function);
}

// std::invalid_argument naming `what` if `pointer` is null.
template <typename Pointer>
void need(Pointer* pointer, const char* what) {
  if (pointer == nullptr) throw std::invalid_argument(std::string(what) + " is NULL");
}

// std::invalid_argument if a struct is not as large as this version's: nothing was appended so far.
inline void check_size(size_t size, size_t known, const char* type) {
  if (size >= known) return;
  throw std::invalid_argument(std::string(type) + ".size is " + std::to_string(size) + ", not " +
                              std::to_string(known) + ": begin with its _INIT macro");
}

}  // namespace graphshard
