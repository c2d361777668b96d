#include "python_calls.h"

#include <nanobind/stl/pair.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "embed/step_abi.h"
#include "runtime/driver.h"

namespace graphshard {

namespace nb = nanobind;

namespace {

// Note [the end of the interpreter]: a thread that asks for the GIL of an interpreter that is going away is killed by
// it, which a C++ frame on its stack turns into an abort. So the exit handler, which still runs in a whole interpreter,
// closes this gate and waits until every thread that had passed it has what it asked for. After that host functions
// return at once, and daemon threads that come back from a wait stay where they are until the process is gone.
struct Gate {
  std::atomic<int> num_inside{0};
  std::atomic<bool> is_closed{false};
  std::thread::id closing_thread;

  bool enter() {
    num_inside.fetch_add(1);
    if (!is_closed.load()) return true;
    num_inside.fetch_sub(1);
    return false;
  }
  void leave() { num_inside.fetch_sub(1); }
};
Gate gate;

constexpr auto kExitWait = std::chrono::seconds(2);
constexpr double kExitStreamsWaitS = 0.5;

// A worker's thread state, made at its first Python call and kept: one each time costs a hundred times the call.
struct WorkerState {
  PyThreadState* state = nullptr;
  bool is_inside = false;  // in a section: Python code that a worker runs may drop owners that open another

  ~WorkerState() {
    if (state == nullptr || !gate.enter()) return;
    PyEval_RestoreThread(state);
    PyGILState_Release(PyGILState_UNLOCKED);  // balances the first PyGILState_Ensure: frees the state
    gate.leave();
  }
};
thread_local WorkerState worker;

// Whether this thread is one of Python's and has given up the GIL (PyGILState_Check is not in the stable ABI).
thread_local bool has_released_gil = false;

// This thread inside Python; `is_inside()` is false if the interpreter is going away. Sections nest.
class PythonSection {
 public:
  PythonSection() : is_inside_(gate.enter()) {
    if (!is_inside_) return;
    if (worker.is_inside && !has_released_gil) {
      is_nested_ = true;  // the GIL is this thread's already
    } else if (worker.state != nullptr) {
      PyEval_RestoreThread(worker.state);
      enter_worker();
    } else if (PyGILState_GetThisThreadState() != nullptr) {
      gil_state_ = PyGILState_Ensure();  // a thread of Python's own
      is_pythons_ = true;
      had_released_gil_ = std::exchange(has_released_gil, false);
    } else {
      PyGILState_Ensure();
      worker.state = PyThreadState_Get();
      enter_worker();
    }
  }
  ~PythonSection() {
    if (!is_inside_) return;
    if (is_pythons_) {
      has_released_gil = had_released_gil_;
      PyGILState_Release(gil_state_);
    } else if (!is_nested_) {
      worker.is_inside = was_inside_;
      has_released_gil = had_released_gil_;
      PyEval_SaveThread();
    }
    gate.leave();
  }
  PythonSection(const PythonSection&) = delete;
  PythonSection& operator=(const PythonSection&) = delete;

  bool is_inside() const { return is_inside_; }

 private:
  void enter_worker() {
    was_inside_ = std::exchange(worker.is_inside, true);
    had_released_gil_ = std::exchange(has_released_gil, false);
  }

  const bool is_inside_;
  bool is_nested_ = false;
  bool is_pythons_ = false;
  bool was_inside_ = false;
  bool had_released_gil_ = false;
  PyGILState_STATE gil_state_ = PyGILState_UNLOCKED;
};

// Inside Python only.
void call_and_keep_error(PyObject* callable, CallErrors& errors) {
  PyObject* result = PyObject_CallNoArgs(callable);
  if (result != nullptr) {
    Py_DECREF(result);
  } else {
    errors.fail(std::make_exception_ptr(nb::python_error()));
  }
}

struct PythonCall {
  PyObject* callable;
  CallErrors* errors;
};

void run_python_call(void* argument) {
  const auto& call = *static_cast<const PythonCall*>(argument);
  const HostFunctionScope host_function;
  const PythonSection python;
  if (python.is_inside()) call_and_keep_error(call.callable, *call.errors);
}

// The callables of one Calls, and the place of its errors (which hold Python objects too).
struct PythonCalls {
  std::vector<PythonCall> calls;
  std::shared_ptr<CallErrors> errors = std::make_shared<CallErrors>();

  ~PythonCalls() {
    const PythonSection python;
    if (!python.is_inside()) return;
    for (const PythonCall& call : calls) Py_XDECREF(call.callable);
  }
};

void close_python_calls() {
  gate.closing_thread = std::this_thread::get_id();
  gate.is_closed.store(true);
  if (Driver::is_forked()) return;  // the threads are the parent's
  const ReleasedGil released;
  const auto deadline = std::chrono::steady_clock::now() + kExitWait;
  while (gate.num_inside.load() > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  Driver::begin_exit(kExitStreamsWaitS);
}

void run_without_gil(void (*function)(void*), void* argument) {
  if (gate.is_closed.load() || has_released_gil || PyGILState_GetThisThreadState() == nullptr) {
    function(argument);
    return;
  }
  const nb::error_scope kept;  // destructors may run while an exception is on its way
  const ReleasedGil released;
  function(argument);
}

// A C caller's thread, which does not hold the GIL: Python's threads have given it up, others never had it.
void run_from_outside(void (*function)(void*), void* argument) {
  const bool had_released_gil = std::exchange(has_released_gil, true);
  function(argument);
  has_released_gil = had_released_gil;
}

}  // namespace

ReleasedGil::ReleasedGil() : state_(PyEval_SaveThread()) { has_released_gil = true; }

ReleasedGil::~ReleasedGil() {
  has_released_gil = false;
  if (gate.enter()) {
    PyEval_RestoreThread(state_);
    gate.leave();
    return;
  }
  while (std::this_thread::get_id() != gate.closing_thread) std::this_thread::sleep_for(std::chrono::hours(1));
  PyEval_RestoreThread(state_);
}

std::shared_ptr<Calls> make_calls(const nb::sequence& functions, std::shared_ptr<CallErrors> errors) {
  auto owner = std::make_shared<PythonCalls>();
  if (errors != nullptr) owner->errors = std::move(errors);
  const size_t num_functions = nb::len(functions);
  owner->calls.reserve(num_functions);  // entries point into it
  std::vector<std::pair<Calls::Function, void*>> entries;
  entries.reserve(num_functions);
  for (nb::handle function : functions) {
    if (nb::isinstance<nb::tuple>(function)) {
      const auto [address, argument] = nb::cast<std::pair<uintptr_t, uintptr_t>>(function);
      if (address == 0) throw nb::value_error("a C function's address is 0");
      entries.emplace_back(reinterpret_cast<Calls::Function>(address), reinterpret_cast<void*>(argument));
    } else if (PyCallable_Check(function.ptr()) != 0) {
      owner->calls.push_back(PythonCall{function.inc_ref().ptr(), owner->errors.get()});
      entries.emplace_back(&run_python_call, &owner->calls.back());
    } else {
      throw nb::type_error("a call is a Python callable or a tuple (C function's address, argument)");
    }
  }
  errors = owner->errors;
  return std::make_shared<Calls>(std::move(entries), std::move(errors), std::move(owner));
}

void run_one_call(void* one_call) {
  std::unique_ptr<OneCall> call(static_cast<OneCall*>(one_call));
  const HostFunctionScope host_function;
  const PythonSection python;
  if (!python.is_inside()) {
    call.release();  // leaked: there is no interpreter to give the callable back to
    return;
  }
  if (!call->errors->has_failed()) call_and_keep_error(call->callable, *call->errors);
  Py_DECREF(call->callable);
}

std::shared_ptr<const void> keep_object(const nb::handle& object) {
  const auto let_go = [](const PyObject* kept) {
    const PythonSection python;
    if (python.is_inside()) Py_DECREF(const_cast<PyObject*>(kept));
  };
  return std::shared_ptr<const PyObject>(object.inc_ref().ptr(), let_go);
}

void prepare_python_calls() {
  Driver::set_run_unlocked(&run_without_gil);
  set_run_from_outside(&run_from_outside);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&close_python_calls));
}

}  // namespace graphshard
