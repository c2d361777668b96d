/* The header is C99, and its errors are texts. */
#include <graphshard.h>

#include <stdio.h>
#include <string.h>

static int is_failure(gs_status status, gs_status right, const char* part) {
  if (status == right && strstr(gs_last_error(), part) != NULL) return 1;
  fprintf(stderr, "FAILED: status %d (not %d): %s (not %s)\n", (int)status, (int)right, gs_last_error(), part);
  return 0;
}

int main(int argc, char** argv) {
  gs_driver* driver = NULL;
  gs_memory* memory = NULL;
  gs_step_info info = GS_STEP_INFO_INIT;
  gs_list_desc list = GS_LIST_DESC_INIT;
  gs_step_desc desc = GS_STEP_DESC_INIT;
  int is_right = 1;
  if (argc != 2 || gs_version() != GS_VERSION) return 2;
  is_right &= info.size == sizeof(info) && list.size == sizeof(list) && desc.lock_timeout_s > 0.0;
  is_right &= is_failure(gs_driver_open("/no/such/driver.so", 0, &driver), GS_ERROR_DRIVER, "/no/such/driver.so");
  is_right &= is_failure(gs_driver_open(NULL, 0, &driver), GS_ERROR_INVALID, "path is NULL");
  is_right &= driver == NULL;
  if (gs_driver_open(argv[1], 0, &driver) != GS_OK) return 1;
  is_right &= is_failure(gs_memory_allocate(driver, 0, 0, &memory), GS_ERROR_DRIVER, "memory of 0 bytes is refused");
  is_right &= is_failure(gs_memory_allocate(driver, 8, 4, &memory), GS_ERROR_INVALID, "memory flags 4");
  if (gs_memory_allocate(driver, 100, GS_MEMORY_HOST, &memory) != GS_OK || gs_memory_address(memory) == 0) return 1;
  gs_memory_release(memory);
  printf("C99: all is well\n");
  return is_right ? 0 : 1;
}
