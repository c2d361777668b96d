// A step built from C functions and replayed without Python: two ranks, threads of this process, keep half of each
// layer's weights and gather the other half from their peer, one layer ahead, inside a captured graph.
//
// <package> is the folder of graphshard's extension: python -c "import graphshard._core as c; print(c.__file__)"
//
//   c++ -pthread embed.cpp -o embed -I<package>/include -L<package>/lib -lgraphshard -Wl,-rpath,<package>/lib
//   ./embed <package>/lib/libgraphshard_hostcuda.so [REPLAYS]        (on a GPU, compute would be kernels)
#include <graphshard.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

namespace {

constexpr uint32_t kRanks = 2, kLayers = 6, kSlots = 2;
constexpr uint64_t kChunk = 512, kLayer = kRanks * kChunk;  // bytes
constexpr uint32_t kCompute = 0, kCopy = 1;                 // streams
constexpr double kTimeoutS = 30.0;

void check(gs_status status) {
  if (status == GS_OK) return;
  std::fprintf(stderr, "embed: %s\n", gs_last_error());
  std::exit(1);
}

uint8_t weight(uint64_t layer, uint64_t i) { return static_cast<uint8_t>(31 * layer + 7 * i + 1); }

// What a rank keeps of every layer, as a window that its peer maps.
struct Shard {
  gs_memory* window = nullptr;
  int fd = -1;
};

Shard make_shard(gs_driver* driver, uint32_t rank) {
  Shard shard;
  check(gs_memory_allocate(driver, kLayers * kChunk, GS_MEMORY_EXPORTABLE, &shard.window));
  check(gs_memory_export_fd(shard.window, &shard.fd));
  auto* bytes = reinterpret_cast<uint8_t*>(gs_memory_address(shard.window));  // host memory: this is the host driver
  for (uint64_t layer = 0; layer < kLayers; ++layer) {
    for (uint64_t i = 0; i < kChunk; ++i) bytes[layer * kChunk + i] = weight(layer, rank * kChunk + i);
  }
  return shard;
}

// The compute of one layer, a C function: output = weights of the slot + input.
struct Layer {
  const uint8_t* slot;
  const uint8_t* input;
  uint8_t* output;

  static void run(void* self) {
    const Layer& layer = *static_cast<const Layer*>(self);
    for (uint64_t i = 0; i < kLayer; ++i) layer.output[i] = static_cast<uint8_t>(layer.slot[i] + *layer.input);
  }
};

struct Rank {
  gs_stream* streams[2] = {};
  gs_memory* shards[kRanks] = {};
  gs_memory *slots = nullptr, *buffers = nullptr;  // the input's byte, then each layer's output
  std::vector<Layer> layers;
  gs_step* step = nullptr;

  uint64_t input() const { return gs_memory_address(buffers); }
  uint64_t output(uint64_t layer) const { return input() + 64 + layer * kLayer; }
  uint64_t slot(uint64_t layer) const { return gs_memory_address(slots) + layer % kSlots * kLayer; }
};

gs_op event(gs_op_kind kind, uint32_t stream, uint32_t index) {
  gs_op op = {};
  op.kind = kind;
  op.stream = stream;
  op.index = index;
  return op;
}

// Gather a layer, from the own rank on: into a slot that compute has left, then say that it is there.
void add_gather(const Rank& rank, uint32_t layer, std::vector<gs_op>* ops) {
  const uint32_t ready = layer, gate = kLayers + layer;
  if (layer >= kSlots) ops->push_back(event(GS_OP_WAIT, kCopy, gate - kSlots));
  for (uint32_t source = 0; source < kRanks; ++source) {
    gs_op copy = event(GS_OP_COPY, kCopy, 0);
    copy.destination = rank.slot(layer) + source * kChunk;
    copy.source = gs_memory_address(rank.shards[source]) + layer * kChunk;
    copy.num_bytes = kChunk;
    ops->push_back(copy);
  }
  ops->push_back(event(GS_OP_RECORD, kCopy, ready));
}

std::vector<gs_op> make_ops(const Rank& rank) {
  const uint32_t fork = 2 * kLayers;
  std::vector<gs_op> ops = {event(GS_OP_RECORD, kCompute, fork), event(GS_OP_WAIT, kCopy, fork)};
  add_gather(rank, 0, &ops);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    if (layer + 1 < kLayers) add_gather(rank, layer + 1, &ops);  // one layer ahead
    ops.push_back(event(GS_OP_WAIT, kCompute, layer));           // this layer is ready (the last one joins the streams)
    ops.push_back(event(GS_OP_CALL, kCompute, layer));
    ops.push_back(event(GS_OP_RECORD, kCompute, kLayers + layer));  // its slot may be overwritten
  }
  return ops;
}

void build(gs_driver* driver, const std::vector<Shard>& shards, uint32_t my_rank, Rank* rank) {
  for (gs_stream*& stream : rank->streams) check(gs_stream_create(driver, &stream));
  for (uint32_t source = 0; source < kRanks; ++source) {
    if (source == my_rank)
      rank->shards[source] = shards[source].window;
    else
      check(gs_memory_import_fd(driver, shards[source].fd, kLayers * kChunk, 1, &rank->shards[source]));
  }
  check(gs_memory_allocate(driver, kSlots * kLayer, 0, &rank->slots));
  check(gs_memory_allocate(driver, 64 + kLayers * kLayer, 0, &rank->buffers));
  std::vector<gs_call> calls;
  rank->layers.reserve(kLayers);  // calls point into it
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    rank->layers.push_back({reinterpret_cast<uint8_t*>(rank->slot(layer)), reinterpret_cast<uint8_t*>(rank->input()),
                            reinterpret_cast<uint8_t*>(rank->output(layer))});
    calls.push_back({&Layer::run, &rank->layers.back()});
  }
  const std::vector<gs_op> ops = make_ops(*rank);
  gs_list_desc list_desc = GS_LIST_DESC_INIT;
  list_desc.streams = rank->streams;
  list_desc.num_streams = 2;
  list_desc.num_events = 2 * kLayers + 1;
  list_desc.ops = ops.data();
  list_desc.num_ops = ops.size();
  list_desc.calls = calls.data();
  list_desc.num_calls = calls.size();
  gs_list* list = nullptr;
  check(gs_list_create(driver, &list_desc, &list));
  const gs_tensor input = {"input", rank->input(), 1}, output = {"output", rank->output(0), kLayers * kLayer};
  gs_step_desc desc = GS_STEP_DESC_INIT;
  desc.inputs = &input;
  desc.outputs = &output;
  desc.num_inputs = desc.num_outputs = 1;
  check(gs_step_capture(list, &desc, &rank->step));
  gs_list_release(list);  // the step keeps what its graph needs
}

void replay(const Rank& rank, int num_replays) {
  gs_step_info info = GS_STEP_INFO_INIT;
  gs_tensor input = {}, output = {};
  check(gs_step_get_info(rank.step, &info));
  check(gs_step_input(rank.step, "input", &input));
  check(gs_step_output(rank.step, "output", &output));
  for (int i = 0; i < num_replays; ++i) {
    const auto value = static_cast<uint8_t>(i);
    std::memcpy(reinterpret_cast<void*>(input.address), &value, 1);
    check(gs_step_replay(rank.step, info.stream));
    check(gs_step_wait(rank.step, kTimeoutS));
    const auto* bytes = reinterpret_cast<const uint8_t*>(output.address);
    for (uint64_t byte = 0; byte < output.num_bytes; ++byte) {
      const auto right = static_cast<uint8_t>(weight(byte / kLayer, byte % kLayer) + value);
      if (bytes[byte] == right) continue;
      std::fprintf(stderr, "embed: replay %d, byte %d is wrong\n", i, static_cast<int>(byte));
      std::exit(1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: %s DRIVER_LIBRARY [REPLAYS]\n", argv[0]), 2;
  const char* text = argc > 2 ? argv[2] : "10000";
  const bool is_number = text[std::strspn(text, "0123456789")] == '\0' && std::strlen(text) < 10;
  const int num_replays = is_number ? std::atoi(text) : 0;
  if (num_replays < 1) return std::fprintf(stderr, "embed: REPLAYS is \"%s\": give 1 to 999999999\n", text), 2;
  gs_driver* driver = nullptr;
  check(gs_driver_open(argv[1], 0, &driver));
  std::vector<Shard> shards;
  for (uint32_t rank = 0; rank < kRanks; ++rank) shards.push_back(make_shard(driver, rank));
  Rank ranks[kRanks];
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank) build(driver, shards, rank, &ranks[rank]);
  const auto begin = std::chrono::steady_clock::now();
  for (const Rank& rank : ranks) threads.emplace_back(replay, std::cref(rank), num_replays);
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - begin;
  std::printf("%d replays of %u layers on %u ranks, all bytes right, %.0f ns a replay with its check\n", num_replays,
              kLayers, kRanks, elapsed.count() / num_replays);
  for (Rank& rank : ranks) {
    gs_step_release(rank.step);
    for (gs_memory* memory : {rank.slots, rank.buffers}) gs_memory_release(memory);
    for (gs_memory* memory : rank.shards) gs_memory_release(memory);  // the own window, and the peer's mapping
    for (gs_stream* stream : rank.streams) gs_stream_release(stream);
  }
  for (const Shard& shard : shards) close(shard.fd);
  return 0;
}
