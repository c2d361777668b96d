// An event that its user names: timelines, `outputs_ready`, a rank's last use.
#pragma once

#include "runtime/driver.h"

namespace graphshard {

// A list's or a graph's own events, by index.
class EventSet {
 public:
  EventSet(Driver& driver, size_t num_events, unsigned int flags = CU_EVENT_DISABLE_TIMING);
  ~EventSet();
  EventSet(const EventSet&) = delete;
  EventSet& operator=(const EventSet&) = delete;

  const CUevent* data() const { return events_.data(); }
  CUevent operator[](size_t index) const { return events_[index]; }

 private:
  void destroy();

  Driver& driver_;
  std::vector<CUevent> events_;
};

class Event : public std::enable_shared_from_this<Event> {
 public:
  Event(Driver& driver, bool has_timing);
  ~Event();

  Driver& driver() const { return driver_; }
  CUevent handle() const { return (*event_)[0]; }
  bool wait(int64_t timeout_ns) const;
  bool is_done() const;
  double elapsed_us(const Event& earlier) const;

 private:
  Driver& driver_;
  std::shared_ptr<EventSet> event_;
};

}  // namespace graphshard
