// What litmus tests are written with: a registry by name, checks that throw, owners of driver objects, latches.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver_api.h"

namespace graphshard::litmus {

enum class Where { kAnyDriver, kHostOnly };

struct Litmus {
  const char* name;
  Where where;
  void (*run)();
};

std::vector<Litmus>& registry();

struct Registration {
  Registration(const char* name, Where where, void (*run)()) { registry().push_back({name, where, run}); }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// The driver under test cannot do this; says why.
struct Skip : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const char* file, int line, const std::string& text);
/// "900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
std::string describe(CUresult result);
void expect_result(CUresult found, CUresult expected, const char* call, const char* file, int line);
void expect_equal(long long found, long long expected, const char* text, const char* file, int line);

/// How often the hand-off tests hand something on; a command line option.
extern long num_handoffs;
/// Run `name` of this program over the same driver in a fresh process; its exit status, or minus its signal.
/// The process finds `fd`, if one is given, as kInheritedFd.
int run_in_fresh_process(const char* name, std::string* output, int fd = -1);
constexpr int kInheritedFd = 100;

class Stream {
 public:
  explicit Stream(unsigned int flags = CU_STREAM_NON_BLOCKING);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator CUstream() const { return handle_; }
  /// Hand the handle over: destroyed by whoever called this.
  CUstream release();

 private:
  CUstream handle_ = nullptr;
};

class Event {
 public:
  explicit Event(unsigned int flags = CU_EVENT_DISABLE_TIMING);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator CUevent() const { return handle_; }
  CUevent release();

 private:
  CUevent handle_ = nullptr;
};

/// Pinned host memory: bytes that streams, value operations, host functions and the test itself can reach.
class Pinned {
 public:
  explicit Pinned(size_t num_bytes);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  unsigned char* bytes() const { return static_cast<unsigned char*>(memory_); }
  CUdeviceptr address(size_t offset = 0) const { return reinterpret_cast<CUdeviceptr>(memory_) + offset; }
  size_t size() const { return num_bytes_; }
  void fill(unsigned char value) const;
  bool is_all(unsigned char value) const;

 private:
  void* memory_ = nullptr;
  size_t num_bytes_ = 0;
};

/// A word that streams wait for and the test sets: stalls a stream at a known place, without sleeping.
class Latch {
 public:
  Latch() : memory_(64) { set(0); }
  ~Latch() { set(INT32_MAX); }  // a test that failed half-way must not leave a stream stalled
  void stall(CUstream stream, uint32_t until = 1) const;
  void set(uint32_t value) const;
  uint32_t value() const;
  CUdeviceptr address() const { return memory_.address(); }

 private:
  Pinned memory_;
};

/// A graph captured from `origin` while `body` runs; thread-local mode. Both die with it.
class Captured {
 public:
  Captured(CUstream origin, const std::function<void()>& body);
  ~Captured();
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  CUgraph graph() const { return graph_; }
  CUgraphExec exec() const { return exec_; }
  void set_executor(int executor, int64_t seed) const;
  void launch(CUstream stream) const;

 private:
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
};

/// Ended and thrown away when it goes out of scope, whatever state it is in.
class OpenCapture {
 public:
  explicit OpenCapture(CUstream origin, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  ~OpenCapture();
  OpenCapture(const OpenCapture&) = delete;
  OpenCapture& operator=(const OpenCapture&) = delete;
  CUresult end(CUgraph* graph = nullptr);

 private:
  CUstream origin_;
  bool is_open_ = true;
};

size_t num_nodes(CUgraph graph, CUgraphNodeType type);
std::vector<CUgraphNode> nodes_of(CUgraph graph);
size_t num_edges(CUgraph graph);
CUstreamCaptureStatus capture_status(CUstream stream);
void fork(CUstream from, CUevent event, CUstream to);

/// (executor, seed): what a captured graph is run under where the driver lets one choose; one entry elsewhere.
struct Order {
  int executor;
  int64_t seed;
};
std::vector<Order> all_orders(int64_t num_seeds);

}  // namespace graphshard::litmus

#define LITMUS_IN(name, where)                                                                \
  static void name();                                                                         \
  static const ::graphshard::litmus::Registration registration_of_##name(#name, where, name); \
  static void name()
#define LITMUS(name) LITMUS_IN(name, ::graphshard::litmus::Where::kAnyDriver)
#define HOST_LITMUS(name) LITMUS_IN(name, ::graphshard::litmus::Where::kHostOnly)

#define EXPECT(expected, call) ::graphshard::litmus::expect_result((call), (expected), #call, __FILE__, __LINE__)
#define OK(call) EXPECT(CUDA_SUCCESS, call)
#define EQUAL(expected, found)                                                                                \
  ::graphshard::litmus::expect_equal(static_cast<long long>(found), static_cast<long long>(expected), #found, \
                                     __FILE__, __LINE__)
#define TRUE(condition)                                                                       \
  do {                                                                                        \
    if (!(condition)) ::graphshard::litmus::fail(__FILE__, __LINE__, #condition " is false"); \
  } while (false)
