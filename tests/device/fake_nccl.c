// NCCL's entry points as a test wants them: calls are logged, and hang, fail or answer nonsense when told to.
//
// -DVERSION=22809 what it says of itself; -DNO_WINDOWS leaves out the window calls.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 22809
#endif
#define EXPORT __attribute__((visibility("default")))

typedef struct {
  char internal[128];
} UniqueId;

// The fields that are looked at, at the offsets of ncclConfig_t.
typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int before_name[7];
  const char* name;
  int collnet_enable;
  int cta_policy;
  int rest[4];
} Config;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char log_text[1 << 16];
static char hanging[64];  // the call that hangs
static int num_together;  // with how many at once it does not
static int num_stuck;
static char failing[64];
static int failure;
static int async_result;
static int has_null_window;
static int misalignment;

static void start_over(void) {
  hanging[0] = failing[0] = log_text[0] = 0;
  num_together = failure = async_result = has_null_window = misalignment = 0;
  pthread_cond_broadcast(&changed);
}

#define LOCKED(statement)        \
  pthread_mutex_lock(&mutex);    \
  statement;                     \
  pthread_mutex_unlock(&mutex)

EXPORT void fake_reset(void) { LOCKED(start_over()); }
EXPORT void fake_hang(const char* name, int together) {
  LOCKED(strcpy(hanging, name); num_together = together; num_stuck = 0);
}
EXPORT void fake_release(void) { LOCKED(hanging[0] = 0; pthread_cond_broadcast(&changed)); }
EXPORT void fake_fail(const char* name, int result) { LOCKED(strcpy(failing, name); failure = result); }
EXPORT void fake_set_async(int result) { LOCKED(async_result = result); }
EXPORT void fake_null_window(int is_null) { LOCKED(has_null_window = is_null); }
EXPORT void fake_misalign(int num_bytes) { LOCKED(misalignment = num_bytes); }
EXPORT void fake_await_stuck(void) { LOCKED(while (num_stuck == 0) pthread_cond_wait(&changed, &mutex)); }
EXPORT void fake_log(char* text, size_t size) { LOCKED(snprintf(text, size, "%s", log_text)); }

// Logs the call ("*" from the main thread), lets it hang if it is to, and gives its result.
static int enter(const char* name, const char* detail) {
  pthread_mutex_lock(&mutex);
  size_t used = strlen(log_text);
  snprintf(log_text + used, sizeof(log_text) - used, "%s%s%s%s\n", name, gettid() == getpid() ? "*" : "",
           detail[0] ? " " : "", detail);
  if (strcmp(hanging, name) == 0) {
    ++num_stuck;
    pthread_cond_broadcast(&changed);
    while (strcmp(hanging, name) == 0 && (num_together == 0 || num_stuck < num_together)) {
      pthread_cond_wait(&changed, &mutex);
    }
  }
  int result = strcmp(failing, name) == 0 ? failure : 0;
  pthread_mutex_unlock(&mutex);
  return result;
}

EXPORT int ncclGetVersion(int* version) {
  *version = VERSION;
  return 0;
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  memset(id, 7, sizeof(*id));
  return 0;
}
EXPORT const char* ncclGetErrorString(int result) { return result == 3 ? "internal error" : "some error"; }
EXPORT const char* ncclGetLastError(void* comm) {
  (void)comm;
  return failing[0] != 0 || async_result != 0 ? "the fake was told to" : "";
}
EXPORT int ncclCommInitRankConfig(void** comm, int num_ranks, UniqueId id, int rank, const Config* config) {
  char detail[256];
  snprintf(detail, sizeof(detail), "rank=%d/%d id=%d size=%zu magic=%x version=%u blocking=%d cta=%d name=%s", rank,
           num_ranks, id.internal[127], config->size, config->magic, config->version, config->blocking,
           config->cta_policy, config->name);
  int result = enter("ncclCommInitRankConfig", detail);
  *comm = result == 0 ? malloc(1) : NULL;
  return result;
}
EXPORT int ncclCommFinalize(void* comm) { return comm == NULL ? 4 : enter("ncclCommFinalize", ""); }
static int freed(const char* name, void* comm) {
  int result = comm == NULL ? 4 : enter(name, "");
  if (result == 0) free(comm);
  return result;
}
EXPORT int ncclCommDestroy(void* comm) { return freed("ncclCommDestroy", comm); }
EXPORT int ncclCommAbort(void* comm) { return freed("ncclCommAbort", comm); }
EXPORT int ncclCommGetAsyncError(void* comm, int* result) {
  *result = async_result;
  return comm == NULL ? 4 : 0;
}
EXPORT int ncclMemAlloc(void** pointer, size_t num_bytes) {
  int result = enter("ncclMemAlloc", "");
  if (result != 0) return result;
  char* begin = aligned_alloc(4096, num_bytes + 4096);
  memset(begin, 0xa5, num_bytes + 4096);
  *pointer = begin + misalignment;
  return 0;
}
EXPORT int ncclMemFree(void* pointer) {
  int result = enter("ncclMemFree", "");
  free((void*)((size_t)pointer & ~(size_t)4095));
  return result;
}
#ifndef NO_WINDOWS
EXPORT int ncclCommWindowRegister(void* comm, void* pointer, size_t num_bytes, void** window, int flags) {
  char detail[64];
  snprintf(detail, sizeof(detail), "bytes=%zu flags=%d", num_bytes, flags);
  *window = has_null_window ? NULL : pointer;
  return comm == NULL ? 4 : enter("ncclCommWindowRegister", detail);
}
EXPORT int ncclCommWindowDeregister(void* comm, void* window) {
  char detail[32];
  snprintf(detail, sizeof(detail), "%zu", (size_t)window);
  return comm == NULL ? 4 : enter("ncclCommWindowDeregister", detail);
}
#endif
EXPORT int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm, void* stream) {
  char detail[64];
  snprintf(detail, sizeof(detail), "bytes=%zu type=%d", count, type);
  (void)send, (void)receive, (void)stream;
  return comm == NULL ? 4 : enter("ncclAllGather", detail);
}
EXPORT int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op, void* comm,
                             void* stream) {
  char detail[64];
  snprintf(detail, sizeof(detail), "count=%zu type=%d op=%d", count, type, op);
  (void)send, (void)receive, (void)stream;
  return comm == NULL ? 4 : enter("ncclReduceScatter", detail);
}
