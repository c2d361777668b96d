// How entry points are found: names, versions and ABIs, and what is missing.
#include <cstring>

#include "litmus.h"

using namespace graphshard::litmus;

namespace {

void* find(const char* name, int version, CUdriverProcAddressQueryResult* status) {
  void* address = &address;
  OK(cu.get_proc_address(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, status));
  return address;
}

}  // namespace

// The version chooses the ABI.
LITMUS(a_version_chooses_the_abi) {
  CUdriverProcAddressQueryResult status{};
  void* const v1 = find("cuStreamGetCaptureInfo", 10010, &status);
  void* const v2 = find("cuStreamGetCaptureInfo", 11030, &status);
  TRUE(v1 != nullptr && v2 != nullptr && v1 != v2);
  TRUE(find("cuStreamGetCaptureInfo", 12000, &status) == v2);  // the highest that is not newer than asked for
  EQUAL(CU_GET_PROC_ADDRESS_SUCCESS, status);
}

LITMUS(a_missing_name_is_success_with_nothing) {
  CUdriverProcAddressQueryResult status{};
  TRUE(find("cuThereIsNoSuchCall", 12000, &status) == nullptr);
  EQUAL(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, status);
  TRUE(find("cuStreamBeginCapture", 5000, &status) == nullptr);
  EQUAL(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, status);
  TRUE(find("cuThereIsNoSuchCall", 12000, nullptr) == nullptr);  // cuda-python passes no status
  TRUE(find("cuInit", 12000, nullptr) != nullptr);
}

LITMUS(errors_have_names) {
  const char* name = nullptr;
  OK(cu.get_error_name(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, &name));
  TRUE(std::strcmp(name, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED") == 0);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.get_error_name(static_cast<CUresult>(12345), &name));
}

LITMUS(the_device_says_what_it_is) {
  char name[256] = {};
  OK(cu.device_get_name(name, sizeof(name), 0));
  TRUE(name[0] != '\0');
  int version = 0;
  OK(cu.driver_get_version(&version));
  TRUE(version >= 12000);
  int supported = 0;
  OK(cu.device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
  EQUAL(1, supported);
  CUdevice device = 0;
  EXPECT(CUDA_ERROR_INVALID_DEVICE, cu.device_get(&device, 4096));
  unsigned int flags = 0;
  int is_active = 0;
  OK(cu.primary_ctx_get_state(0, &flags, &is_active));
  EQUAL(1, is_active);
}

// Run by the next test in a fresh process, where nothing has called cuInit.
LITMUS(_before_init) {
  CUstream stream = nullptr;
  EXPECT(CUDA_ERROR_NOT_INITIALIZED, cu.stream_create(&stream, CU_STREAM_NON_BLOCKING));
  int count = 0;
  EXPECT(CUDA_ERROR_NOT_INITIALIZED, cu.device_get_count(&count));
}

LITMUS(nothing_works_before_init) {
  std::string output;
  if (run_in_fresh_process("_before_init", &output) != 0) fail(__FILE__, __LINE__, output);
}

HOST_LITMUS(the_null_stream_is_refused) {
  const Pinned bytes(64);
  EXPECT(CUDA_ERROR_NOT_SUPPORTED, cu.memset_8_async(bytes.address(), 1, 64, nullptr));
  EXPECT(CUDA_ERROR_NOT_SUPPORTED, cu.memset_8_async(bytes.address(), 1, 64, CU_STREAM_PER_THREAD));
  const Stream blocking(CU_STREAM_DEFAULT);
  const OpenCapture capture(blocking);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cu.memset_8_async(bytes.address(), 1, 64, nullptr));
}
