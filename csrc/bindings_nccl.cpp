// NCCL libraries and communicators for Python.
#include <nanobind/stl/optional.h>

#include <chrono>
#include <cstring>

#include "bindings.h"
#include "nccl/communicator.h"

namespace graphshard {

namespace {

// Local calls, and those whose peers are on their way already.
constexpr double kDefaultTimeoutS = 60.0;
constexpr double kExitWaitS = 1.0;

void translate_nccl_error(const std::exception_ptr& error, void* type) {
  try {
    std::rethrow_exception(error);
  } catch (const NcclError& failure) {
    nb::object raised = nb::borrow(static_cast<PyObject*>(type))(failure.what());
    raised.attr("code") = failure.code();
    raised.attr("entry_point") = failure.entry_point();
    PyErr_SetObject(static_cast<PyObject*>(type), raised.ptr());
  }
}

// Checked before the call is made, not after.
Limit limit_of(double timeout_s) {
  check_timeout(timeout_s);
  return {timeout_s, [](HelperCall& call, double seconds) {
            return wait_bounded(seconds, [&](int64_t slice_ns) { return call.wait(slice_ns); });
          }};
}

std::optional<Limit> limit_of(std::optional<double> timeout_s) {
  return timeout_s ? std::optional<Limit>(limit_of(*timeout_s)) : std::nullopt;
}

ncclUniqueId to_unique_id(const nb::bytes& bytes) {
  ncclUniqueId id{};
  if (bytes.size() != sizeof(id.internal)) {
    throw nb::value_error(("a unique id has 128 bytes, these are " + std::to_string(bytes.size())).c_str());
  }
  std::memcpy(id.internal, bytes.data(), sizeof(id.internal));
  return id;
}

nb::bytes unique_id(const NcclLibrary& library) {
  ncclUniqueId id{};
  {
    const ReleasedGil released;
    id = library.unique_id();
  }
  return nb::bytes(id.internal, sizeof(id.internal));
}

// Without Python's lock unless there is a limit: `limit_of`'s way of waiting lets go of it.
template <typename Call>
void call_directly_or_bounded(const std::optional<Limit>& limit, const Call& call) {
  if (limit) return call();
  const ReleasedGil released;
  call();
}

void all_gather(Communicator& communicator, CUdeviceptr destination, CUdeviceptr source, size_t num_bytes,
                const Stream& stream, std::optional<double> timeout_s) {
  const auto limit = limit_of(timeout_s);
  call_directly_or_bounded(limit, [&] { communicator.all_gather(destination, source, num_bytes, stream, limit); });
}

void reduce_scatter(Communicator& communicator, CUdeviceptr destination, CUdeviceptr source, size_t num_elements,
                    const std::string& dtype, const Stream& stream, std::optional<double> timeout_s) {
  const auto limit = limit_of(timeout_s);
  const ElementType type = element_type(dtype);
  call_directly_or_bounded(
      limit, [&] { communicator.reduce_scatter(destination, source, num_elements, type, stream, limit); });
}

// What is left of a limit after dropped graphs are gone, so that the call that follows is not refused for their sake.
Limit limit_without_graphs(const Communicator& communicator, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  wait_bounded(timeout_s, [&](int64_t slice_ns) { return communicator.wait_unheld(slice_ns); });
  const double taken_s = std::chrono::duration<double>(Clock::now() - begin).count();
  return limit_of(std::max(timeout_s - taken_s, 0.0));
}

std::vector<bool> abort_all(const std::vector<std::shared_ptr<Communicator>>& communicators, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  check_timeout(timeout_s);
  for (const auto& communicator : communicators) communicator->begin_abort();
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  std::vector<bool> are_over;
  for (const auto& communicator : communicators) {
    const double left_s = std::chrono::duration<double>(deadline - Clock::now()).count();
    are_over.push_back(communicator->abort(limit_of(std::max(left_s, 0.0))));
  }
  return are_over;
}

void bind_communicator(nb::module_& m) {
  nb::class_<Collective>(m, "Collective")
      .def_prop_ro("world_size", &Collective::world_size)
      .def_prop_ro("name", &Collective::name);
  nb::class_<Communicator, Collective>(m, "Communicator")
      .def(nb::new_([](std::shared_ptr<NcclLibrary> library, const nb::bytes& id, int world_size, int rank,
                       const std::string& name, double timeout_s) {
             return Communicator::open(std::move(library), to_unique_id(id), world_size, rank, name,
                                       limit_of(timeout_s));
           }),
           "library"_a, "unique_id"_a, "world_size"_a, "rank"_a, "name"_a, "timeout_s"_a)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("is_broken", &Communicator::is_broken)
      .def(
          "allocate",
          [](Communicator& communicator, size_t num_bytes, double timeout_s) {
            auto loan = communicator.borrow(num_bytes, limit_of(timeout_s));
            const ReleasedGil released;
            return communicator.adopt(std::move(loan));
          },
          "num_bytes"_a, "timeout_s"_a = kDefaultTimeoutS)
      .def(
          "register",
          [](Communicator& communicator, const Memory& memory, double timeout_s) {
            communicator.register_window(memory, limit_of(timeout_s));
          },
          "memory"_a, "timeout_s"_a)
      .def(
          "deregister",
          [](Communicator& communicator, const Memory& memory, double timeout_s) {
            communicator.deregister_window(memory, limit_without_graphs(communicator, timeout_s));
          },
          "memory"_a, "timeout_s"_a = kDefaultTimeoutS)
      .def("all_gather", &all_gather, "destination"_a, "source"_a, "num_bytes"_a, "stream"_a,
           "timeout_s"_a = nb::none())
      .def("reduce_scatter", &reduce_scatter, "destination"_a, "source"_a, "num_elements"_a, "dtype"_a, "stream"_a,
           "timeout_s"_a = nb::none())
      .def("async_error", &Communicator::async_error, nb::call_guard<ReleasedGil>())
      .def(
          "abort", [](Communicator& communicator, double timeout_s) { return communicator.abort(limit_of(timeout_s)); },
          "timeout_s"_a)
      .def_static("abort_all", &abort_all, "communicators"_a, "timeout_s"_a)
      .def(
          "destroy",
          [](Communicator& communicator, double timeout_s) {
            return communicator.destroy(limit_without_graphs(communicator, timeout_s));
          },
          "timeout_s"_a);
}

}  // namespace

void bind_nccl(nb::module_& m) {
  PyObject* nccl_error = PyErr_NewException("graphshard._core.NcclError", PyExc_RuntimeError, nullptr);
  m.attr("NcclError") = nb::steal(nccl_error);
  nb::register_exception_translator(&translate_nccl_error, m.attr("NcclError").ptr());
  nb::class_<NcclLibrary>(m, "NcclLibrary")
      .def(nb::new_([](const std::string& path, Driver& driver) {
             const ReleasedGil released;
             return NcclLibrary::load(path, driver);
           }),
           "path"_a, "driver"_a)
      .def_prop_ro("path", &NcclLibrary::path)
      .def_prop_ro("version", &NcclLibrary::version)
      .def_prop_ro("missing", &NcclLibrary::missing)
      .def("unique_id", &unique_id);
  bind_communicator(m);
  // Registered before the handler that closes the drivers (prepare_python_calls), so it runs after it: aborts of
  // dropped communicators that are under way may end, others are left to the end of the process.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
    const ReleasedGil released;
    if (!Driver::is_forked()) HelperCall::drain(kExitWaitS);
  }));
}

}  // namespace graphshard
