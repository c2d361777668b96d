// The Python module graphshard._core, made of the bindings_*.cpp files.
#include "bindings.h"

#include <cstring>

#include "driver/error.h"

namespace graphshard {

namespace {

void translate_driver_error(const std::exception_ptr& error, void* type) {
  try {
    std::rethrow_exception(error);
  } catch (const DriverError& failure) {
    nb::object raised = nb::borrow(static_cast<PyObject*>(type))(failure.what());
    raised.attr("code") = static_cast<int>(failure.code());
    raised.attr("entry_point") = failure.entry_point();
    PyErr_SetObject(static_cast<PyObject*>(type), raised.ptr());
  }
}

}  // namespace

}  // namespace graphshard

NB_MODULE(_core, m) {
  using namespace graphshard;
  nb::set_leak_warnings(false);  // a process may end with everything alive
  PyObject* driver_error = PyErr_NewException("graphshard._core.DriverError", PyExc_RuntimeError, nullptr);
  m.attr("DriverError") = nb::steal(driver_error);
  nb::register_exception_translator(&translate_driver_error, m.attr("DriverError").ptr());
  bind_device(m);
  bind_nccl(m);
  bind_lists(m);
  bind_control(m);
  bind_embed(m);
  m.def(
      "memcpy",
      [](uintptr_t destination, uintptr_t source, size_t num_bytes) {
        std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), num_bytes);
      },
      "destination"_a, "source"_a, "num_bytes"_a, nb::call_guard<ReleasedGil>());
  prepare_python_calls();
}
