// The C API of drivers, memory and streams.
#include <map>

#include "embed/handles.h"

namespace graphshard {

namespace {

// One for each driver, and never destroyed, as the driver itself.
gs_driver* handle_of(Driver& driver) {
  static auto* mutex = new std::mutex;
  static auto* all = new std::map<Driver*, gs_driver>;
  const std::lock_guard<std::mutex> guard(*mutex);
  return &all->try_emplace(&driver, gs_driver{&driver}).first->second;
}

}  // namespace

}  // namespace graphshard

using namespace graphshard;

gs_status gs_driver_open(const char* path, int device_index, gs_driver** driver) {
  return api([&] {
    need(path, "path");
    need(driver, "driver");
    *driver = handle_of(Driver::open(path, device_index));
    return GS_OK;
  });
}

gs_status gs_memory_allocate(gs_driver* driver, uint64_t num_bytes, unsigned int flags, gs_memory** memory) {
  return api([&] {
    need(driver, "driver");
    need(memory, "memory");
    if ((flags & ~(GS_MEMORY_EXPORTABLE | GS_MEMORY_HOST)) != 0) {
      throw std::invalid_argument("memory flags " + std::to_string(flags) +
                                  ": GS_MEMORY_EXPORTABLE and GS_MEMORY_HOST are known");
    }
    const bool is_exportable = (flags & GS_MEMORY_EXPORTABLE) != 0;
    *memory =
        new gs_memory{(flags & GS_MEMORY_HOST) != 0 ? Memory::allocate_host(*driver->driver, num_bytes, is_exportable)
                                                    : Memory::allocate(*driver->driver, num_bytes, is_exportable)};
    return GS_OK;
  });
}

gs_status gs_memory_import_fd(gs_driver* driver, int fd, uint64_t num_bytes, int is_read_only, gs_memory** memory) {
  return api([&] {
    need(driver, "driver");
    need(memory, "memory");
    *memory = new gs_memory{Memory::import_fd(*driver->driver, fd, num_bytes, is_read_only != 0)};
    return GS_OK;
  });
}

gs_status gs_memory_export_fd(gs_memory* memory, int* fd) {
  return api([&] {
    need(memory, "memory");
    need(fd, "fd");
    *fd = memory->memory->export_fd();
    return GS_OK;
  });
}

uint64_t gs_memory_address(const gs_memory* memory) { return memory == nullptr ? 0 : memory->memory->address(); }

void gs_memory_release(gs_memory* memory) { delete memory; }

gs_status gs_stream_create(gs_driver* driver, gs_stream** stream) {
  return api([&] {
    need(driver, "driver");
    need(stream, "stream");
    *stream = new gs_stream{std::make_shared<Stream>(*driver->driver)};
    return GS_OK;
  });
}

gs_status gs_stream_from_handle(gs_driver* driver, void* handle, gs_stream** stream) {
  return api([&] {
    need(driver, "driver");
    need(stream, "stream");
    *stream = new gs_stream{Stream::from_handle(*driver->driver, static_cast<CUstream>(handle))};
    return GS_OK;
  });
}

void* gs_stream_handle(const gs_stream* stream) {
  return stream == nullptr ? nullptr : static_cast<void*>(stream->stream->handle()->stream);
}

gs_status gs_stream_wait(gs_stream* stream, double timeout_s) {
  return api([&] {
    need(stream, "stream");
    if (stream->stream->wait_idle(timeout_ns(timeout_s))) return GS_OK;
    throw TimeoutError("the stream's work did not end within " + std::to_string(timeout_s) + " s");
  });
}

void gs_stream_release(gs_stream* stream) { delete stream; }
