#include "runtime/event.h"

#include "runtime/allowed_in_captures.h"

namespace graphshard {

Event::Event(Driver& driver, bool has_timing) : driver_(driver) {
  driver_.enter();
  event_ = std::make_shared<EventSet>(driver_, 1, has_timing ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING);
}

Event::~Event() {
  if (HostFunctionScope::is_inside()) driver_.retire(std::move(event_));
}

bool Event::wait(int64_t timeout_ns) const {
  driver_.enter();
  return driver_.wait_event(handle(), timeout_ns);
}

bool Event::is_done() const {
  driver_.enter();
  const AllowedInCaptures allowed(driver_.table());
  const CUresult result = driver_.table().cuEventQuery(handle());
  if (result != CUDA_ERROR_NOT_READY) driver_.table().check(result, "cuEventQuery");
  return result == CUDA_SUCCESS;
}

double Event::elapsed_us(const Event& earlier) const {
  driver_.enter();
  float elapsed_ms = 0;
  GRAPHSHARD_CALL(driver_.table(), cuEventElapsedTime, &elapsed_ms, earlier.handle(), handle());
  return static_cast<double>(elapsed_ms) * 1e3;
}

EventSet::EventSet(Driver& driver, size_t num_events, unsigned int flags) : driver_(driver) {
  const AllowedInCaptures allowed(driver_.table());
  events_.reserve(num_events);
  try {
    for (size_t i = 0; i < num_events; ++i) {
      CUevent event = nullptr;
      GRAPHSHARD_CALL(driver_.table(), cuEventCreate, &event, flags);
      events_.push_back(event);
    }
  } catch (...) {
    destroy();
    throw;
  }
}

EventSet::~EventSet() { destroy(); }

void EventSet::destroy() {
  if (!driver_.is_usable()) return;
  const AllowedInCaptures allowed(driver_.table());
  for (CUevent event : events_) driver_.table().cuEventDestroy(event);
  events_.clear();
}

}  // namespace graphshard
