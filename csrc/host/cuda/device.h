// Initialisation, the one device, its primary context.
#pragma once

#include <cuda.h>

namespace graphshard::hostcuda {

CUresult init(unsigned int flags);
CUresult driver_get_version(int* version);
CUresult device_get(CUdevice* device, int ordinal);
CUresult device_get_count(int* count);
CUresult device_get_name(char* name, int num_bytes, CUdevice device);
CUresult device_get_uuid(CUuuid* uuid, CUdevice device);
CUresult device_total_mem(size_t* num_bytes, CUdevice device);
CUresult device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice device);
CUresult device_can_access_peer(int* can, CUdevice device, CUdevice peer);

CUresult primary_context_retain(CUcontext* context, CUdevice device);
CUresult primary_context_release(CUdevice device);
CUresult primary_context_get_state(CUdevice device, unsigned int* flags, int* is_active);
CUresult primary_context_set_flags(CUdevice device, unsigned int flags);
CUresult context_get_current(CUcontext* context);
CUresult context_set_current(CUcontext context);
CUresult context_push_current(CUcontext context);
CUresult context_pop_current(CUcontext* context);
CUresult context_get_device(CUdevice* device);
CUresult context_get_flags(unsigned int* flags);
CUresult context_get_api_version(CUcontext context, unsigned int* version);
CUresult context_get_id(CUcontext context, unsigned long long* id);
CUresult context_get_stream_priority_range(int* least, int* greatest);

CUresult get_error_name(CUresult error, const char** name);
CUresult get_error_string(CUresult error, const char** text);

}  // namespace graphshard::hostcuda
