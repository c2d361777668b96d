# What ThreadSanitizer is told when C++ tests run under it.
#
# It guesses the size of a dlopened library's thread-local storage from the heap's own bytes before it, and now and then
# gives up over the guess ("failed to allocate"): it is told not to look.
set(tsan_options "TSAN_OPTIONS=suppressions=${CMAKE_CURRENT_LIST_DIR}/tsan.supp:intercept_tls_get_addr=0")
