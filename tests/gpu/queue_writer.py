"""A writer to another process's GPU memory: run as a script, without torch, so that it starts fast.

Arguments: path of libcudart, handle (hex), bytes, copies. It fills two sources. With copies above
0 it queues that many of one and the other in turn, says so, and does nothing more: the GPU is busy
for seconds. With 0 it copies and waits, one by one, `NEIGHBOUR_COPIES` for each line it is told.
"""

from __future__ import annotations

import sys
import time

from pdrt.kv.cuda import CopyStream, CudaAllocation, CudaDevice, CudaRuntime

WORDS = (0x11, 0x22)
NEIGHBOUR_COPIES = 2000


def main() -> None:
    path, handle, size, copies = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    device = CudaDevice(CudaRuntime(path), 0)
    target = device.map_shared(bytes.fromhex(handle))
    sources = [CudaAllocation(device, size) for _ in WORDS]
    for source, word in zip(sources, WORDS, strict=True):
        device.call("cudaMemset", source.address, word, size)
    device.call("cudaDeviceSynchronize")
    stream = CopyStream(device)
    stream.copy(target, sources[0].address, size)
    stream.settle()
    for number in range(copies):
        stream.copy(target, sources[number % 2].address, size)
    print("queued", flush=True)
    if copies:
        time.sleep(3600)
    for _ in sys.stdin:
        for number in range(NEIGHBOUR_COPIES):
            stream.copy(target, sources[number % 2].address, size)
            stream.settle()
        print("done", flush=True)


if __name__ == "__main__":
    main()
