// Drivers, memory, streams and events for Python.
#include "bindings.h"
#include "driver/devices.h"
#include "runtime/memory.h"
#include "runtime/stream_capture.h"

namespace graphshard {

namespace {

int memory_get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto& memory = *nb::inst_ptr<Memory>(self);
  view->obj = nullptr;
  if (!memory.is_host_readable()) {
    PyErr_SetString(PyExc_BufferError, "device memory has no buffer on the host: copy it to host memory first");
    return -1;
  }
  return PyBuffer_FillInfo(view, self, reinterpret_cast<void*>(memory.address()),
                           static_cast<Py_ssize_t>(memory.num_bytes()), memory.is_read_only() ? 1 : 0, flags);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&memory_get_buffer)}, {0, nullptr}};

void enqueue_python_call(Stream& stream, const nb::callable& function) {
  if (is_captured_here(*stream.handle())) {
    call_in_capture(*stream.handle(), make_calls(nb::borrow<nb::sequence>(nb::make_tuple(function)), stream.errors()));
    return;
  }
  auto* call = new OneCall{function.inc_ref().ptr(), stream.errors()};
  try {
    const ReleasedGil released;
    stream.call(&run_one_call, call);
  } catch (...) {
    function.dec_ref();
    delete call;
    throw;
  }
}

void bind_driver(nb::module_& m) {
  nb::class_<Driver>(m, "Driver")
      .def(nb::new_([](const std::string& path, int device_index) {
             // Never deleted, see Note [drivers live for good].
             return std::shared_ptr<Driver>(&Driver::open(path, device_index), [](Driver*) {});
           }),
           "path"_a, "device_index"_a = 0)
      .def_prop_ro("path", &Driver::path)
      .def_prop_ro("version", &Driver::version)
      .def_prop_ro("is_host", &Driver::is_host)
      .def_prop_ro("device_name", &Driver::device_name)
      .def_prop_ro("total_bytes", &Driver::total_bytes)
      .def_prop_ro("free_bytes", &Driver::free_bytes)
      .def_prop_ro("granularity_bytes", &Driver::granularity_bytes)
      .def_prop_ro("num_retired",
                   [](Driver& driver) {
                     driver.enter();
                     driver.reap();
                     return driver.num_retired();
                   })
      .def("attribute", &Driver::attribute, "attribute"_a);
  m.def("device_uuids", &device_uuids, "path"_a, nb::call_guard<ReleasedGil>());
}

void bind_memory(nb::module_& m) {
  nb::class_<Memory>(m, "Memory", nb::type_slots(memory_slots))
      .def(nb::new_([](Driver& driver, size_t num_bytes, bool exportable, bool fabric) {
             const ReleasedGil released;
             return Memory::allocate(driver, num_bytes, exportable, fabric);
           }),
           "driver"_a, "num_bytes"_a, "exportable"_a = false, "fabric"_a = false)
      .def_static(
          "allocate_host",
          [](Driver& driver, size_t num_bytes, bool exportable) {
            const ReleasedGil released;
            return Memory::allocate_host(driver, num_bytes, exportable);
          },
          "driver"_a, "num_bytes"_a, "exportable"_a = false)
      .def_static(
          "import_fd",
          [](Driver& driver, int fd, size_t num_bytes, bool read_only) {
            const ReleasedGil released;
            return Memory::import_fd(driver, fd, num_bytes, read_only);
          },
          "driver"_a, "fd"_a, "num_bytes"_a, "read_only"_a = true)
      .def_static(
          "import_fabric",
          [](Driver& driver, const nb::bytes& handle, size_t num_bytes, bool read_only) {
            const std::string bytes(handle.c_str(), handle.size());
            const ReleasedGil released;
            return Memory::import_fabric(driver, bytes, num_bytes, read_only);
          },
          "driver"_a, "handle"_a, "num_bytes"_a, "read_only"_a = true)
      .def_prop_ro("address", &Memory::address)
      .def_prop_ro("num_bytes", &Memory::num_bytes)
      .def_prop_ro("generation", &Memory::generation)
      .def_prop_ro("is_read_only", &Memory::is_read_only)
      .def_prop_ro("is_host_readable", &Memory::is_host_readable)
      .def("export_fabric",
           [](const Memory& memory) {
             const std::string handle = memory.export_fabric();
             return nb::bytes(handle.data(), handle.size());
           })
      .def("export_fd", &Memory::export_fd);
}

void bind_streams(nb::module_& m) {
  using Released = nb::call_guard<ReleasedGil>;
  nb::class_<Event>(m, "Event")
      .def(nb::new_([](Driver& driver, bool timing) { return std::make_shared<Event>(driver, timing); }), "driver"_a,
           "timing"_a = false)
      .def(
          "synchronize",
          [](const Event& event, double timeout_s) {
            return wait_bounded(timeout_s, [&](int64_t slice_ns) { return event.wait(slice_ns); });
          },
          "timeout_s"_a)
      .def("is_done", &Event::is_done)
      .def("elapsed_us", &Event::elapsed_us, "earlier"_a);
  nb::class_<Stream>(m, "Stream")
      .def(nb::new_([](Driver& driver) { return std::make_shared<Stream>(driver); }), "driver"_a)
      .def_static(
          "from_handle",
          [](Driver& driver, uintptr_t handle) {
            return Stream::from_handle(driver, reinterpret_cast<CUstream>(handle));
          },
          "driver"_a, "handle"_a)
      .def_prop_ro("handle", [](const Stream& stream) { return reinterpret_cast<uintptr_t>(stream.handle()->stream); })
      .def("begin_capture", &begin_capture, "lock_timeout_s"_a = 0.0, Released())
      .def("end_capture", &end_capture, Released())
      .def(
          "synchronize",
          [](const Stream& stream, double timeout_s) {
            return wait_bounded(timeout_s, [&](int64_t slice_ns) { return stream.wait_idle(slice_ns); });
          },
          "timeout_s"_a)
      .def("is_idle", &Stream::is_idle)
      .def("copy", &Stream::copy, "destination"_a, "source"_a, "num_bytes"_a, Released())
      .def("fill", &Stream::fill, "destination"_a, "value"_a, "num_bytes"_a, Released())
      .def(
          "write_value",
          [](Stream& stream, CUdeviceptr address, const nb::int_& value) { stream.write_value(address, word(value)); },
          "address"_a, "value"_a)
      .def(
          "wait_value",
          [](Stream& stream, CUdeviceptr address, const nb::int_& value) { stream.wait_value(address, word(value)); },
          "address"_a, "value"_a)
      .def("call", &enqueue_python_call, "function"_a)
      .def("check", [](Stream& stream) { stream.errors()->check(); })
      .def("record", &Stream::record, "event"_a, Released())
      .def("wait", &Stream::wait, "event"_a, Released());
}

}  // namespace

void bind_device(nb::module_& m) {
  bind_driver(m);
  bind_memory(m);
  bind_streams(m);
}

}  // namespace graphshard
