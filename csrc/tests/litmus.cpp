#include "litmus.h"

#include <cstdio>
#include <cstring>

namespace graphshard::litmus {

long num_handoffs = 2000;

std::vector<Litmus>& registry() {
  static std::vector<Litmus> all;
  return all;
}

void fail(const char* file, int line, const std::string& text) {
  const char* slash = std::strrchr(file, '/');
  throw Failure(std::string(slash == nullptr ? file : slash + 1) + ":" + std::to_string(line) + ": " + text);
}

std::string describe(CUresult result) {
  const char* name = nullptr;
  if (cu.get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "(unknown)";
  return std::to_string(static_cast<int>(result)) + " " + name;
}

void expect_result(CUresult found, CUresult expected, const char* call, const char* file, int line) {
  if (found != expected)
    fail(file, line, std::string(call) + " gave " + describe(found) + ", not " + describe(expected));
}

void expect_equal(long long found, long long expected, const char* text, const char* file, int line) {
  if (found == expected) return;
  fail(file, line, std::string(text) + " is " + std::to_string(found) + ", not " + std::to_string(expected));
}

Stream::Stream(unsigned int flags) { OK(cu.stream_create(&handle_, flags)); }

Stream::~Stream() {
  if (handle_ != nullptr) cu.stream_destroy(handle_);
}

CUstream Stream::release() {
  CUstream handle = handle_;
  handle_ = nullptr;
  return handle;
}

Event::Event(unsigned int flags) { OK(cu.event_create(&handle_, flags)); }

Event::~Event() {
  if (handle_ != nullptr) cu.event_destroy(handle_);
}

CUevent Event::release() {
  CUevent handle = handle_;
  handle_ = nullptr;
  return handle;
}

Pinned::Pinned(size_t num_bytes) : num_bytes_(num_bytes) {
  OK(cu.mem_host_alloc(&memory_, num_bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
  fill(0);
}

Pinned::~Pinned() { cu.mem_free_host(memory_); }

void Pinned::fill(unsigned char value) const { std::memset(memory_, value, num_bytes_); }

bool Pinned::is_all(unsigned char value) const {
  for (size_t i = 0; i < num_bytes_; ++i) {
    if (bytes()[i] != value) return false;
  }
  return true;
}

void Latch::stall(CUstream stream, uint32_t until) const {
  OK(cu.stream_wait_value_32(stream, address(), until, CU_STREAM_WAIT_VALUE_GEQ));
}

void Latch::set(uint32_t value) const {
  __atomic_store_n(reinterpret_cast<uint32_t*>(memory_.bytes()), value, __ATOMIC_RELEASE);
}

uint32_t Latch::value() const {
  return __atomic_load_n(reinterpret_cast<uint32_t*>(memory_.bytes()), __ATOMIC_ACQUIRE);
}

Captured::Captured(CUstream origin, const std::function<void()>& body) {
  OpenCapture capture(origin);
  body();
  OK(capture.end(&graph_));
  OK(cu.graph_instantiate(&exec_, graph_, 0));
}

Captured::~Captured() {
  if (exec_ != nullptr) cu.graph_exec_destroy(exec_);
  if (graph_ != nullptr) cu.graph_destroy(graph_);
}

void Captured::set_executor(int executor, int64_t seed) const {
  if (cu.is_host()) OK(cu.host_set_executor(exec_, executor, seed));
}

void Captured::launch(CUstream stream) const { OK(cu.graph_launch(exec_, stream)); }

OpenCapture::OpenCapture(CUstream origin, CUstreamCaptureMode mode) : origin_(origin) {
  OK(cu.stream_begin_capture(origin, mode));
}

OpenCapture::~OpenCapture() {
  if (is_open_) end();
}

CUresult OpenCapture::end(CUgraph* graph) {
  is_open_ = false;
  CUgraph unwanted = nullptr;
  const CUresult result = cu.stream_end_capture(origin_, graph == nullptr ? &unwanted : graph);
  if (unwanted != nullptr) cu.graph_destroy(unwanted);
  return result;
}

std::vector<CUgraphNode> nodes_of(CUgraph graph) {
  size_t count = 0;
  OK(cu.graph_get_nodes(graph, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  if (count != 0) OK(cu.graph_get_nodes(graph, nodes.data(), &count));
  return nodes;
}

size_t num_nodes(CUgraph graph, CUgraphNodeType type) {
  size_t count = 0;
  for (CUgraphNode node : nodes_of(graph)) {
    CUgraphNodeType found{};
    OK(cu.graph_node_get_type(node, &found));
    if (found == type) ++count;
  }
  return count;
}

size_t num_edges(CUgraph graph) {
  size_t count = 0;
  OK(cu.graph_get_edges(graph, nullptr, nullptr, &count));
  return count;
}

CUstreamCaptureStatus capture_status(CUstream stream) {
  CUstreamCaptureStatus status{};
  OK(cu.stream_is_capturing(stream, &status));
  return status;
}

void fork(CUstream from, CUevent event, CUstream to) {
  OK(cu.event_record(event, from));
  OK(cu.stream_wait_event(to, event, 0));
}

std::vector<Order> all_orders(int64_t num_seeds) {
  std::vector<Order> orders = {{0, -1}};
  if (!cu.is_host()) return orders;
  orders.push_back({1, -1});
  orders.push_back({0, -2});
  orders.push_back({0, -3});
  for (int64_t seed = 0; seed < num_seeds; ++seed) orders.push_back({0, seed});
  return orders;
}

}  // namespace graphshard::litmus
