// What the device says it can do; an attribute that is not listed is 0: "no".
#include <thread>

#include "device.h"
#include "guard.h"

namespace graphshard::hostcuda {

namespace {

struct Attribute {
  CUdevice_attribute name;
  int value;
};

constexpr Attribute kAttributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 1},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_INTEGRATED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
};

}  // namespace

CUresult device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  GS_RETURN_IF_ERROR(enter());
  if (value == nullptr || attribute < 1 || attribute > 200) return CUDA_ERROR_INVALID_VALUE;
  if (device != kDevice) return CUDA_ERROR_INVALID_DEVICE;
  *value = 0;
  if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) {
    *value = static_cast<int>(std::thread::hardware_concurrency());
    return CUDA_SUCCESS;
  }
  for (const Attribute& known : kAttributes) {
    if (known.name == attribute) *value = known.value;
  }
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
