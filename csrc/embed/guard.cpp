#include "embed/guard.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace graphshard {

namespace {

gs_status fail(ErrorText* error, gs_status status, const char* text) {
  std::strncpy(error->text, text, sizeof(error->text) - 1);
  error->text[sizeof(error->text) - 1] = '\0';
  return status;
}

}  // namespace

gs_status status_of_exception(ErrorText* error) {
  try {
    throw;
  } catch (const DriverError& failure) {
    return fail(error, GS_ERROR_DRIVER, failure.what());
  } catch (const CollectiveError& failure) {
    return fail(error, GS_ERROR_COLLECTIVE, failure.what());
  } catch (const StateError& failure) {
    return fail(error, GS_ERROR_STATE, failure.what());
  } catch (const NotFoundError& failure) {
    return fail(error, GS_ERROR_NOT_FOUND, failure.what());
  } catch (const TimeoutError& failure) {
    return fail(error, GS_TIMEOUT, failure.what());
  } catch (const CallError& failure) {
    return fail(error, GS_ERROR_CALL, failure.what());
  } catch (const std::invalid_argument& failure) {
    return fail(error, GS_ERROR_INVALID, failure.what());
  } catch (const std::out_of_range& failure) {
    return fail(error, GS_ERROR_INVALID, failure.what());
  } catch (const std::exception& failure) {
    return fail(error, GS_ERROR_INTERNAL, failure.what());
  } catch (...) {
    return fail(error, GS_ERROR_INTERNAL, "an exception of an unknown type");
  }
}

int64_t timeout_ns(double timeout_s) {
  if (!std::isfinite(timeout_s) || timeout_s < 0.0) {
    throw std::invalid_argument("timeout_s is a finite number of seconds, 0 or more: waits are never unbounded");
  }
  return static_cast<int64_t>(std::min(timeout_s * 1e9, 9e18));
}

}  // namespace graphshard
