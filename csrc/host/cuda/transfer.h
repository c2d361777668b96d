// Copies and fills: CUDA's descriptions of them, and the calls that enqueue them or do them at once.
//
// The synchronous calls run on the calling thread and are not ordered with any stream: there is no null stream.
#pragma once

#include <cuda.h>

#include "work.h"

namespace graphshard::hostcuda {

CUresult parse_copy(const CUDA_MEMCPY3D& params, CopyWork* copy);
CUDA_MEMCPY3D describe_copy(const CopyWork& copy);
CUresult parse_fill(const CUDA_MEMSET_NODE_PARAMS& params, FillWork* fill);
CUDA_MEMSET_NODE_PARAMS describe_fill(const FillWork& fill);

CUresult memcpy_sync(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes);
CUresult memcpy_host_to_device(CUdeviceptr destination, const void* source, size_t num_bytes);
CUresult memcpy_device_to_host(void* destination, CUdeviceptr source, size_t num_bytes);
CUresult memcpy_2d(const CUDA_MEMCPY2D* params);
CUresult memcpy_3d(const CUDA_MEMCPY3D* params);
CUresult memset_8(CUdeviceptr destination, unsigned char value, size_t count);
CUresult memset_16(CUdeviceptr destination, unsigned short value, size_t count);
CUresult memset_32(CUdeviceptr destination, unsigned int value, size_t count);

CUresult memcpy_async(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream);
CUresult memcpy_host_to_device_async(CUdeviceptr destination, const void* source, size_t num_bytes, CUstream stream);
CUresult memcpy_device_to_host_async(void* destination, CUdeviceptr source, size_t num_bytes, CUstream stream);
CUresult memcpy_2d_async(const CUDA_MEMCPY2D* params, CUstream stream);
CUresult memcpy_3d_async(const CUDA_MEMCPY3D* params, CUstream stream);
CUresult memcpy_batch_async_v12080(CUdeviceptr* destinations, CUdeviceptr* sources, size_t* sizes, size_t count,
                                   CUmemcpyAttributes* attributes, size_t* attribute_indices, size_t num_attributes,
                                   size_t* failed_index, CUstream stream);
CUresult memcpy_batch_async_v13000(CUdeviceptr* destinations, CUdeviceptr* sources, size_t* sizes, size_t count,
                                   CUmemcpyAttributes* attributes, size_t* attribute_indices, size_t num_attributes,
                                   CUstream stream);
CUresult memset_8_async(CUdeviceptr destination, unsigned char value, size_t count, CUstream stream);
CUresult memset_16_async(CUdeviceptr destination, unsigned short value, size_t count, CUstream stream);
CUresult memset_32_async(CUdeviceptr destination, unsigned int value, size_t count, CUstream stream);
CUresult memset_2d_8_async(CUdeviceptr destination, size_t pitch, unsigned char value, size_t width, size_t rows,
                           CUstream stream);
CUresult memset_2d_16_async(CUdeviceptr destination, size_t pitch, unsigned short value, size_t width, size_t rows,
                            CUstream stream);
CUresult memset_2d_32_async(CUdeviceptr destination, size_t pitch, unsigned int value, size_t width, size_t rows,
                            CUstream stream);

}  // namespace graphshard::hostcuda
