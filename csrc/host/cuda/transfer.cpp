#include "transfer.h"

#include "capture.h"
#include "guard.h"
#include "memory.h"
#include "stream.h"

namespace graphshard::hostcuda {

namespace {

CopyWork flat_copy(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes) {
  CopyWork copy;
  copy.destination = reinterpret_cast<char*>(destination);
  copy.source = reinterpret_cast<const char*>(source);
  copy.row_bytes = num_bytes;
  return copy;
}

FillWork fill_of(CUdeviceptr destination, uint32_t value, uint32_t element_bytes, size_t width) {
  FillWork fill;
  fill.destination = reinterpret_cast<char*>(destination);
  fill.value = value;
  fill.element_bytes = element_bytes;
  fill.width = width;
  return fill;
}

CUresult check(const CopyWork& copy) {
  if (copy.num_bytes() == 0) return CUDA_SUCCESS;
  return copy.destination == nullptr || copy.source == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult check(const FillWork& fill) {
  if (fill.width * fill.rows == 0) return CUDA_SUCCESS;
  const auto address = reinterpret_cast<CUdeviceptr>(fill.destination);
  if (address == 0 || address % fill.element_bytes != 0) return CUDA_ERROR_INVALID_VALUE;
  if (fill.rows == 1) return CUDA_SUCCESS;
  const bool fits = fill.pitch % fill.element_bytes == 0 && fill.pitch / fill.element_bytes >= fill.width;
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool is_empty(const CopyWork& copy) { return copy.num_bytes() == 0; }
bool is_empty(const FillWork& fill) { return fill.width * fill.rows == 0; }

template <typename Transfer>
CUresult enqueue(const Transfer& transfer, CUstream stream) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  GS_RETURN_IF_ERROR(check(transfer));
  return is_empty(transfer) ? CUDA_SUCCESS : submit(stream, transfer);
}

template <typename Transfer>
CUresult run_now(const Transfer& transfer) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check(transfer));
  GS_RETURN_IF_ERROR(refuse_if_unsafe());
  if (!is_empty(transfer)) run_to_end(transfer);
  return CUDA_SUCCESS;
}

/// One end of CUDA's copy description.
struct End {
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  size_t x_bytes;
  size_t y;
  size_t z;
  size_t pitch;
  size_t height;
};

CUresult parse_end(const End& end, const CopyWork& copy, char** address, size_t* pitch, size_t* slice) {
  if (end.type == CU_MEMORYTYPE_ARRAY) return CUDA_ERROR_NOT_SUPPORTED;
  const bool on_host = end.type == CU_MEMORYTYPE_HOST;
  if (!on_host && end.type != CU_MEMORYTYPE_DEVICE && end.type != CU_MEMORYTYPE_UNIFIED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *pitch = end.pitch == 0 ? end.x_bytes + copy.row_bytes : end.pitch;
  if (copy.rows > 1 && *pitch < end.x_bytes + copy.row_bytes) return CUDA_ERROR_INVALID_VALUE;
  if (copy.planes > 1 && end.height < end.y + copy.rows) return CUDA_ERROR_INVALID_VALUE;
  *slice = *pitch * (end.height == 0 ? copy.rows : end.height);
  const CUdeviceptr base = on_host ? reinterpret_cast<CUdeviceptr>(end.host) : end.device;
  if (base == 0) return CUDA_ERROR_INVALID_VALUE;
  *address = reinterpret_cast<char*>(base + end.z * *slice + end.y * *pitch + end.x_bytes);
  return CUDA_SUCCESS;
}

CUmemorytype type_at(const void* address) {
  Range range;
  return find_range(reinterpret_cast<CUdeviceptr>(address), &range) ? range.type : CU_MEMORYTYPE_HOST;
}

CUDA_MEMCPY3D widen(const CUDA_MEMCPY2D& flat) {
  CUDA_MEMCPY3D params{};
  params.srcXInBytes = flat.srcXInBytes;
  params.srcY = flat.srcY;
  params.srcMemoryType = flat.srcMemoryType;
  params.srcHost = flat.srcHost;
  params.srcDevice = flat.srcDevice;
  params.srcPitch = flat.srcPitch;
  params.dstXInBytes = flat.dstXInBytes;
  params.dstY = flat.dstY;
  params.dstMemoryType = flat.dstMemoryType;
  params.dstHost = flat.dstHost;
  params.dstDevice = flat.dstDevice;
  params.dstPitch = flat.dstPitch;
  params.WidthInBytes = flat.WidthInBytes;
  params.Height = flat.Height;
  params.Depth = 1;
  return params;
}

FillWork rows_of(FillWork fill, size_t pitch, size_t rows) {
  fill.pitch = pitch;
  fill.rows = rows;
  return fill;
}

}  // namespace

CUresult parse_copy(const CUDA_MEMCPY3D& params, CopyWork* copy) {
  *copy = CopyWork{};
  copy->row_bytes = params.WidthInBytes;
  copy->rows = params.Height;
  copy->planes = params.Depth;
  if (copy->num_bytes() == 0) return CUDA_SUCCESS;
  const End from{params.srcMemoryType, params.srcHost, params.srcDevice, params.srcXInBytes,
                 params.srcY,          params.srcZ,    params.srcPitch,  params.srcHeight};
  const End to{params.dstMemoryType, params.dstHost, params.dstDevice, params.dstXInBytes,
               params.dstY,          params.dstZ,    params.dstPitch,  params.dstHeight};
  char* source = nullptr;
  GS_RETURN_IF_ERROR(parse_end(from, *copy, &source, &copy->source_pitch, &copy->source_slice));
  copy->source = source;
  return parse_end(to, *copy, &copy->destination, &copy->destination_pitch, &copy->destination_slice);
}

CUDA_MEMCPY3D describe_copy(const CopyWork& copy) {
  CUDA_MEMCPY3D params{};
  params.srcMemoryType = type_at(copy.source);
  params.dstMemoryType = type_at(copy.destination);
  if (params.srcMemoryType == CU_MEMORYTYPE_HOST) params.srcHost = copy.source;
  if (params.srcMemoryType != CU_MEMORYTYPE_HOST) params.srcDevice = reinterpret_cast<CUdeviceptr>(copy.source);
  if (params.dstMemoryType == CU_MEMORYTYPE_HOST) params.dstHost = copy.destination;
  if (params.dstMemoryType != CU_MEMORYTYPE_HOST) params.dstDevice = reinterpret_cast<CUdeviceptr>(copy.destination);
  const auto rows_a_plane = [&copy](size_t slice, size_t pitch) { return copy.planes > 1 ? slice / pitch : copy.rows; };
  params.srcPitch = copy.source_pitch == 0 ? copy.row_bytes : copy.source_pitch;
  params.dstPitch = copy.destination_pitch == 0 ? copy.row_bytes : copy.destination_pitch;
  params.srcHeight = rows_a_plane(copy.source_slice, params.srcPitch);
  params.dstHeight = rows_a_plane(copy.destination_slice, params.dstPitch);
  params.WidthInBytes = copy.row_bytes;
  params.Height = copy.rows;
  params.Depth = copy.planes;
  return params;
}

CUresult parse_fill(const CUDA_MEMSET_NODE_PARAMS& params, FillWork* fill) {
  const unsigned int bytes = params.elementSize;
  if (bytes != 1 && bytes != 2 && bytes != 4) return CUDA_ERROR_INVALID_VALUE;
  *fill = rows_of(fill_of(params.dst, params.value, bytes, params.width), params.pitch, params.height);
  return check(*fill);
}

CUDA_MEMSET_NODE_PARAMS describe_fill(const FillWork& fill) {
  CUDA_MEMSET_NODE_PARAMS params{};
  params.dst = reinterpret_cast<CUdeviceptr>(fill.destination);
  params.pitch = fill.pitch;
  params.value = fill.value;
  params.elementSize = fill.element_bytes;
  params.width = fill.width;
  params.height = fill.rows;
  return params;
}

CUresult memcpy_sync(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes) {
  return run_now(flat_copy(destination, source, num_bytes));
}

CUresult memcpy_host_to_device(CUdeviceptr destination, const void* source, size_t num_bytes) {
  return memcpy_sync(destination, reinterpret_cast<CUdeviceptr>(source), num_bytes);
}

CUresult memcpy_device_to_host(void* destination, CUdeviceptr source, size_t num_bytes) {
  return memcpy_sync(reinterpret_cast<CUdeviceptr>(destination), source, num_bytes);
}

CUresult memcpy_3d(const CUDA_MEMCPY3D* params) {
  CopyWork copy;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(parse_copy(*params, &copy));
  return run_now(copy);
}

CUresult memcpy_2d(const CUDA_MEMCPY2D* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_MEMCPY3D wide = widen(*params);
  return memcpy_3d(&wide);
}

CUresult memset_8(CUdeviceptr destination, unsigned char value, size_t count) {
  return run_now(fill_of(destination, value, 1, count));
}

CUresult memset_16(CUdeviceptr destination, unsigned short value, size_t count) {
  return run_now(fill_of(destination, value, 2, count));
}

CUresult memset_32(CUdeviceptr destination, unsigned int value, size_t count) {
  return run_now(fill_of(destination, value, 4, count));
}

CUresult memcpy_async(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream) {
  return enqueue(flat_copy(destination, source, num_bytes), stream);
}

CUresult memcpy_host_to_device_async(CUdeviceptr destination, const void* source, size_t num_bytes, CUstream stream) {
  return memcpy_async(destination, reinterpret_cast<CUdeviceptr>(source), num_bytes, stream);
}

CUresult memcpy_device_to_host_async(void* destination, CUdeviceptr source, size_t num_bytes, CUstream stream) {
  return memcpy_async(reinterpret_cast<CUdeviceptr>(destination), source, num_bytes, stream);
}

CUresult memcpy_3d_async(const CUDA_MEMCPY3D* params, CUstream stream) {
  CopyWork copy;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(parse_copy(*params, &copy));
  return enqueue(copy, stream);
}

CUresult memcpy_2d_async(const CUDA_MEMCPY2D* params, CUstream stream) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_MEMCPY3D wide = widen(*params);
  return memcpy_3d_async(&wide, stream);
}

CUresult memcpy_batch_async_v12080(CUdeviceptr* destinations, CUdeviceptr* sources, size_t* sizes, size_t count,
                                   CUmemcpyAttributes* /*attributes*/, size_t* /*attribute_indices*/,
                                   size_t /*num_attributes*/, size_t* failed_index, CUstream stream) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  GS_RETURN_IF_ERROR(refuse_in_capture(stream));
  if (destinations == nullptr || sources == nullptr || sizes == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    const CUresult result =
        sizes[i] == 0 ? CUDA_ERROR_INVALID_VALUE : check(flat_copy(destinations[i], sources[i], sizes[i]));
    if (result == CUDA_SUCCESS) continue;
    if (failed_index != nullptr) *failed_index = i;
    return result;
  }
  for (size_t i = 0; i < count; ++i) {
    GS_RETURN_IF_ERROR(stream->push(flat_copy(destinations[i], sources[i], sizes[i])));
  }
  return CUDA_SUCCESS;
}

CUresult memcpy_batch_async_v13000(CUdeviceptr* destinations, CUdeviceptr* sources, size_t* sizes, size_t count,
                                   CUmemcpyAttributes* attributes, size_t* attribute_indices, size_t num_attributes,
                                   CUstream stream) {
  return memcpy_batch_async_v12080(destinations, sources, sizes, count, attributes, attribute_indices, num_attributes,
                                   nullptr, stream);
}

CUresult memset_8_async(CUdeviceptr destination, unsigned char value, size_t count, CUstream stream) {
  return enqueue(fill_of(destination, value, 1, count), stream);
}

CUresult memset_16_async(CUdeviceptr destination, unsigned short value, size_t count, CUstream stream) {
  return enqueue(fill_of(destination, value, 2, count), stream);
}

CUresult memset_32_async(CUdeviceptr destination, unsigned int value, size_t count, CUstream stream) {
  return enqueue(fill_of(destination, value, 4, count), stream);
}

CUresult memset_2d_8_async(CUdeviceptr destination, size_t pitch, unsigned char value, size_t width, size_t rows,
                           CUstream stream) {
  return enqueue(rows_of(fill_of(destination, value, 1, width), pitch, rows), stream);
}

CUresult memset_2d_16_async(CUdeviceptr destination, size_t pitch, unsigned short value, size_t width, size_t rows,
                            CUstream stream) {
  return enqueue(rows_of(fill_of(destination, value, 2, width), pitch, rows), stream);
}

CUresult memset_2d_32_async(CUdeviceptr destination, size_t pitch, unsigned int value, size_t width, size_t rows,
                            CUstream stream) {
  return enqueue(rows_of(fill_of(destination, value, 4, width), pitch, rows), stream);
}

}  // namespace graphshard::hostcuda
