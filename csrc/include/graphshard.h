/* graphshard.h: build and replay captured steps without Python. C99; link with -lgraphshard.
 *
 * Ownership
 *   Every gs_* object is counted: what returns one gives you one reference, *_release gives it back, and work that is
 *   still enqueued keeps what it uses. A list keeps its streams and memory, a step its graph with all that the graph
 *   points at. So any order of releases is right, also while a step is replayed.
 *   Functions and arguments of calls are yours: they live until the step or list is released and its work has ended.
 *   A step taken from Python (gs_step_open) owns its graph, streams, buffers, slots and shard windows, and the memory
 *   pool behind them, also after Python has dropped or closed its own objects; only the interpreter's end ends it: from
 *   then on every call returns GS_ERROR_DRIVER.
 *   A driver is never closed. A CUstream of yours outlives every step that was replayed on it, and every gs_stream that
 *   was made from it. To a step that Python captured, the stream of a gs_stream is one of yours.
 *
 * Threads
 *   Every function may be called from any thread; none needs a current CUDA context, and each may leave the device's
 *   primary context current. One step's replays are ordered as they are called; steps of one order (gs_order; all steps
 *   of one Python runtime) share slots and are ordered with each other, on whatever streams they are replayed.
 *   Building captures: one capture at a time in a process, others wait up to a limit.
 *   A host function (gs_call) may call nothing of this header but gs_last_error. Waits are bounded by their timeout_s.
 *   A thread of Python's calls with the GIL released, as ctypes.CDLL does.
 *
 * Errors
 *   Every function that can fail returns a gs_status; gs_last_error() is the text of this thread's latest failure.
 *   Out parameters are written on GS_OK only.
 *
 * Versions
 *   Structs begin with their size: set it with sizeof, as the GS_*_INIT macros do. Fields are only ever appended.
 */
#ifndef GRAPHSHARD_H
#define GRAPHSHARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define GS_API __attribute__((visibility("default")))
#else
#define GS_API
#endif

#define GS_VERSION 1

typedef enum gs_status {
  GS_OK = 0,
  GS_ERROR_INVALID = 1,    /* an argument that cannot be */
  GS_ERROR_DRIVER = 2,     /* a driver call failed, or was refused before it could */
  GS_ERROR_COLLECTIVE = 3, /* a collective of a gs_collective failed */
  GS_ERROR_CALL = 4,       /* a host function of the step failed (Python's raised) */
  GS_ERROR_STATE = 5,      /* not now: weights are being written, slots do not hold what the step expects, ... */
  GS_ERROR_NOT_FOUND = 6,  /* no such name, no captured shape that fits */
  GS_TIMEOUT = 7,          /* the limit passed first; what was waited for goes on */
  GS_ERROR_INTERNAL = 8
} gs_status;

typedef struct gs_driver gs_driver;
typedef struct gs_memory gs_memory;
typedef struct gs_stream gs_stream;
typedef struct gs_list gs_list;
typedef struct gs_order gs_order;
typedef struct gs_step gs_step;

/* The version of the library, GS_VERSION of the header that it was built with. */
GS_API int gs_version(void);
/* This thread's latest error: what failed, what was found, where, what to do. Valid until its next failing call. */
GS_API const char* gs_last_error(void);

/* ---- steps ------------------------------------------------------------------------------------------------------ */

typedef struct gs_step_info {
  size_t size;
  int64_t batch_size; /* the captured shape: sequences, tokens of each */
  int64_t tokens_per_sequence;
  void* stream; /* the CUstream it was captured from: replay there if you have no other */
  size_t num_inputs;
  size_t num_outputs;
  int has_prefetch; /* whether gs_step_prefetch has anything to do for this step */
} gs_step_info;
#define GS_STEP_INFO_INIT {sizeof(gs_step_info), 0, 0, 0, 0, 0, 0}

/* A static buffer of a step. The name lives as long as the step. */
typedef struct gs_tensor {
  const char* name;
  uint64_t address;
  uint64_t num_bytes;
} gs_tensor;

/* A step that Python captured, by `StepGraph.handle`, while Python still holds it. One reference, yours from then on.
 * Under transport nccl a replay needs all ranks, and nothing here compares what they do: replay alike on all of them,
 * in one order with whatever Python does (StepGraph.promise_alike), or a gather waits for good. */
GS_API gs_status gs_step_open(uint64_t handle, gs_step** step);
GS_API void gs_step_retain(gs_step* step);
GS_API void gs_step_release(gs_step* step);

GS_API gs_status gs_step_get_info(gs_step* step, gs_step_info* info);
GS_API gs_status gs_step_input(gs_step* step, const char* name, gs_tensor* tensor);
GS_API gs_status gs_step_output(gs_step* step, const char* name, gs_tensor* tensor);
GS_API gs_status gs_step_input_at(gs_step* step, size_t index, gs_tensor* tensor);
GS_API gs_status gs_step_output_at(gs_step* step, size_t index, gs_tensor* tensor);

/* The smallest of `steps` that fits: at least batch_size sequences, exactly tokens_per_sequence. Takes no reference. */
GS_API gs_status gs_steps_choose(gs_step* const* steps, size_t num_steps, int64_t batch_size,
                                 int64_t tokens_per_sequence, gs_step** step);

/* Enqueue the step on a CUstream; not on the null, legacy or per-thread default stream. Never blocks the host.
 * Its slots are filled first where they do not hold what it expects. Order: after whatever the stream was given, and
 * after the order's last replay. Write inputs on the same stream before, read outputs on it after, or gs_step_wait. */
GS_API gs_status gs_step_replay(gs_step* step, void* stream);
/* The host waits until the outputs of the latest replay may be read (a tail prefetch may still run), then reports what
 * host functions of the step left: GS_ERROR_CALL. */
GS_API gs_status gs_step_wait(gs_step* step, double timeout_s);
/* Begin to gather what the step expects in its slots, beside whatever else runs, after the order's last replay. The
 * next replay waits for it on its stream, and does it itself if nobody did. */
GS_API gs_status gs_step_prefetch(gs_step* step);
GS_API gs_status gs_step_prefetch_wait(gs_step* step, double timeout_s);
/* Move the graph to the device now, so that the first replay does not. */
GS_API gs_status gs_step_upload(gs_step* step, void* stream);
/* The version of the weights; odd while they are being written, or a write did not end: then replays and prefetches are
 * GS_ERROR_STATE. 0 if none is kept. */
GS_API gs_status gs_step_epoch(gs_step* step, uint64_t* epoch);

/* ---- driver, memory, streams ------------------------------------------------------------------------------------ */

/* A driver library by path (libcuda.so.1, or graphshard's host driver), its device's primary context retained. The
 * same path and index give the same driver. */
GS_API gs_status gs_driver_open(const char* path, int device_index, gs_driver** driver);

#define GS_MEMORY_EXPORTABLE 1u /* a window: gs_memory_export_fd */
#define GS_MEMORY_HOST 2u       /* pinned memory of the host, which host and device use at one address */
/* Zeroed; as large as asked, in whole granules of the device. */
GS_API gs_status gs_memory_allocate(gs_driver* driver, uint64_t num_bytes, unsigned int flags, gs_memory** memory);
/* Map a window that a peer exported, num_bytes as the peer asked for. The descriptor stays yours. */
GS_API gs_status gs_memory_import_fd(gs_driver* driver, int fd, uint64_t num_bytes, int is_read_only,
                                     gs_memory** memory);
/* A new descriptor, yours to close or to send away. */
GS_API gs_status gs_memory_export_fd(gs_memory* memory, int* fd);
GS_API uint64_t gs_memory_address(const gs_memory* memory);
GS_API void gs_memory_release(gs_memory* memory);

GS_API gs_status gs_stream_create(gs_driver* driver, gs_stream** stream);
/* A CUstream of yours; not the null, legacy or per-thread default stream. */
GS_API gs_status gs_stream_from_handle(gs_driver* driver, void* handle, gs_stream** stream);
GS_API void* gs_stream_handle(const gs_stream* stream);
GS_API gs_status gs_stream_wait(gs_stream* stream, double timeout_s);
GS_API void gs_stream_release(gs_stream* stream);

/* ---- lists of ops ----------------------------------------------------------------------------------------------- */

typedef enum gs_op_kind {
  GS_OP_RECORD = 0,         /* event `index` */
  GS_OP_WAIT = 1,           /* event `index` */
  GS_OP_COPY = 2,           /* destination, source, num_bytes */
  GS_OP_COPY_2D = 3,        /* destination, destination_pitch, source, source_pitch, num_bytes of a row, rows */
  GS_OP_CALL = 4,           /* call `index` */
  GS_OP_FILL = 5,           /* destination, value (a byte), num_bytes */
  GS_OP_WRITE_VALUE = 6,    /* destination (a 32-bit word), value */
  GS_OP_WAIT_VALUE = 7,     /* source (a 32-bit word), value: until the word, as a signed difference, is >= value */
  GS_OP_ALL_GATHER = 8,     /* collective `index`, destination, source, num_bytes of each rank */
  GS_OP_REDUCE_SCATTER = 9, /* collective `index`, destination, source, num_elements of each rank, value: a gs_type */
  GS_OP_COUNT = 10
} gs_op_kind;

typedef enum gs_type { GS_FLOAT16 = 6, GS_FLOAT32 = 7, GS_BFLOAT16 = 9 } gs_type; /* NCCL's numbers */

/* One op; fields that its kind does not name are 0. Addresses lie in gs_memory of the list's driver. */
typedef struct gs_op {
  uint32_t kind;
  uint32_t stream; /* index into the list's streams; stream 0 is the origin, which every other joins and rejoins */
  uint32_t index;
  uint32_t value;
  uint64_t destination;
  uint64_t source;
  uint64_t num_bytes;
  uint64_t rows;
  uint64_t destination_pitch;
  uint64_t source_pitch;
  uint64_t num_elements;
} gs_op;

typedef struct gs_call {
  void (*function)(void* argument);
  void* argument;
} gs_call;

/* A communicator of yours. Its functions enqueue on a CUstream that may be captured and return 0, or a code that
 * becomes GS_ERROR_COLLECTIVE. `context` lives until the list and its steps are released and their work has ended. */
typedef struct gs_collective {
  void* context;
  const char* name;
  int world_size;
  int (*all_gather)(void* context, uint64_t destination, uint64_t source, uint64_t num_bytes, void* stream);
  int (*reduce_scatter)(void* context, uint64_t destination, uint64_t source, uint64_t num_elements, int type,
                        void* stream);
} gs_collective;

typedef struct gs_list_desc {
  size_t size;
  gs_stream* const* streams;
  size_t num_streams;
  size_t num_events;
  const gs_op* ops;
  size_t num_ops;
  const gs_call* calls;
  size_t num_calls;
  const gs_collective* collectives;
  size_t num_collectives;
} gs_list_desc;
#define GS_LIST_DESC_INIT {sizeof(gs_list_desc), 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* Checks every index and address; the error names the op. Arrays are copied. */
GS_API gs_status gs_list_create(gs_driver* driver, const gs_list_desc* desc, gs_list** list);
/* Run ops [begin, end) now, without a graph. */
GS_API gs_status gs_list_issue(gs_list* list, size_t begin, size_t end);
GS_API void gs_list_release(gs_list* list);

/* ---- capturing a step ------------------------------------------------------------------------------------------- */

/* What steps over the same slots share: one last use, and what the slots hold. */
GS_API gs_status gs_order_create(gs_driver* driver, gs_order** order);
/* Rely on nothing that the slots hold: somebody else wrote to them. */
GS_API void gs_order_forget(gs_order* order);
GS_API void gs_order_release(gs_order* order);

typedef struct gs_step_desc {
  size_t size;
  int64_t batch_size;
  int64_t tokens_per_sequence;
  const gs_tensor* inputs;
  size_t num_inputs;
  const gs_tensor* outputs;
  size_t num_outputs;
  gs_order* order;       /* NULL: of its own */
  gs_list* prefetch;     /* NULL: none. Gathers what the slots hold at `entry`; of one stream, without calls */
  uint64_t entry;        /* what the slots must hold when the step begins, by a number of yours; 0: nothing */
  uint64_t exit;         /* what they hold when it has ended; 0: nothing that can be relied on */
  gs_memory* done;       /* NULL, or host-readable: the list writes 1 to its first word when outputs may be read */
  const char* executor;  /* host driver only: "cooperative" (NULL) or "threaded" */
  double lock_timeout_s; /* how long another capture of this process may take to end */
} gs_step_desc;
#define GS_STEP_DESC_INIT {sizeof(gs_step_desc), 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10.0}

/* Capture the list from its stream 0 and instantiate the graph. Nothing runs. */
GS_API gs_status gs_step_capture(gs_list* list, const gs_step_desc* desc, gs_step** step);

#ifdef __cplusplus
}
#endif

#endif
