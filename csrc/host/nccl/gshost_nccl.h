// What the host NCCL offers beyond NCCL: faults on demand, for tests.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/// For the whole process, replacing what was staged before; "" clears. 0, or -1 for a spec that is not understood.
/// Items, separated by `;`:
///   version=22809            what ncclGetVersion says
///   null_window              registrations succeed with a null window
///   skip:rank=1,call=3       that rank's third ncclAllGather from now on does nothing, and succeeds
///   swap:rank=1,call=3       it is issued after the fourth
///   first_use_hang           two ranks, version before 2.31.2: the first gather never ends
///   sm_kernel                gathers fall back to the SM kernel although both buffers lie in windows
///   abort_hang               ncclCommAbort does not return while this is staged
int gshost_nccl_stage(const char* spec);

/// 1 if a call of this process has met the staged fault of this name ("skip", "version") since it was staged, else 0.
int gshost_nccl_stage_met(const char* name);

#ifdef __cplusplus
}
#endif
