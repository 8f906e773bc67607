// A kernel of a graph may begin before the one in front of it has ended, if it calls this before it reads or writes what
// other kernels of the graph do (programmatic dependent launch). Then all that is in front has ended, and the next one
// may begin. Outside of such graphs nothing happens.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
