// Processes: forked children, exits with work in flight, timed waits; on the host driver.
#include <csignal>
#include <cstdlib>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "litmus.h"

using namespace graphshard::litmus;

namespace {

constexpr int64_t kMillisecondNs = 1000000;

/// The exit status of `body` in a forked child; the parent's driver has threads.
template <typename Body>
int status_of_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  TRUE(waitpid(child, &status, 0) == child);
  TRUE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

}  // namespace

// By every call: the driver is not initialized there. The parent's work goes on.
HOST_LITMUS(a_forked_child_is_told_so) {
  const Stream stream;
  const Event event;
  const Latch latch;
  const Pinned bytes(64);
  latch.stall(stream);
  const int status = status_of_child([&] {
    CUstream fresh = nullptr;
    if (cu.stream_create(&fresh, 0) != CUDA_ERROR_NOT_INITIALIZED) return 1;
    if (cu.stream_synchronize(stream) != CUDA_ERROR_NOT_INITIALIZED) return 2;
    if (cu.memset_8_async(bytes.address(), 1, 64, stream) != CUDA_ERROR_NOT_INITIALIZED) return 3;
    if (cu.event_record(event, stream) != CUDA_ERROR_NOT_INITIALIZED) return 4;
    if (cu.stream_destroy(stream) != CUDA_ERROR_NOT_INITIALIZED) return 5;
    if (cu.init(0) != CUDA_ERROR_NOT_INITIALIZED) return 6;
    return 0;
  });
  EQUAL(0, status);
  latch.set(1);
  OK(cu.stream_synchronize(stream));  // the parent is none the worse
}

HOST_LITMUS(a_timed_wait_ends_in_time_and_harms_nothing) {
  const Stream stream;
  const Event event;
  const Latch latch;
  latch.stall(stream);
  OK(cu.event_record(event, stream));
  for (int64_t timeout_ns : {int64_t{0}, kMillisecondNs}) {
    EXPECT(CUDA_ERROR_NOT_READY, cu.host_stream_wait(stream, timeout_ns));
    EXPECT(CUDA_ERROR_NOT_READY, cu.host_event_wait(event, timeout_ns));
  }
  latch.set(1);
  OK(cu.host_event_wait(event, -1));
  OK(cu.host_stream_wait(stream, 60000 * kMillisecondNs));
  OK(cu.stream_query(stream));
  const OpenCapture capture(stream);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.host_stream_wait(stream, 0));
}

namespace {

void leave_work_behind() {
  static auto* const stream = new Stream;  // never destroyed, as a program that exits in a hurry leaves them
  static auto* const latch = new Latch;
  latch->stall(*stream);
  static auto* const captured = new Captured(*stream, [&] { latch->stall(*stream, 2); });
  captured->set_executor(1, -1);
  captured->launch(*stream);
}

}  // namespace

// Run by the tests below in fresh processes: each leaves with a stream stalled for ever.
HOST_LITMUS(_exit_with_stalled_streams) { leave_work_behind(); }

HOST_LITMUS(_exit_from_a_thread) {
  leave_work_behind();
  std::thread([] { std::exit(0); }).join();
}

HOST_LITMUS(_exit_with_destroyed_streams) {
  static auto* const latch = new Latch;
  for (int i = 0; i < 20; ++i) {
    const Stream stream;
    latch->stall(stream);
  }
}

HOST_LITMUS(a_process_leaves_at_once_whatever_is_stalled) {
  for (const char* name : {"_exit_with_stalled_streams", "_exit_from_a_thread", "_exit_with_destroyed_streams"}) {
    std::string output;
    const int status = run_in_fresh_process(name, &output);
    if (status != 0) fail(__FILE__, __LINE__, name + (" left with " + std::to_string(status)) + ": " + output);
  }
}
