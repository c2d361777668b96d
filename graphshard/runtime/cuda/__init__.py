"""Compute on a CUDA device: segments run by torch on our compute stream, captured by `torch.cuda.graph`.

torch_cuda   every call of torch.cuda, behind a seam that tests play
compute      eager steps, warm-ups and captures
window       what holds while a capture is open
watch        what no capture should hold, refused by the op's name
step         a captured step
in_flight    steps that the host does not wait for
watchdog     who looks after them where they need peers
"""
