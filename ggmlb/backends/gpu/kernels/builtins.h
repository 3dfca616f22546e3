/* Declarations of the OpenCL C builtins that the kernels call. PoCL parses 18,000 lines of its own for each program,
   which opencl/pocl.py switches off. */
#define BUILTIN_ __attribute__((overloadable))
#define PURE_    __attribute__((overloadable, const))
PURE_ size_t get_local_id(uint);
PURE_ size_t get_group_id(uint);
PURE_ size_t get_num_groups(uint);
BUILTIN_ __attribute__((convergent)) void barrier(cl_mem_fence_flags);
BUILTIN_ int atomic_cmpxchg(volatile __global int *, int, int);
PURE_ float sqrt(float);
PURE_ float fabs(float);
PURE_ float floor(float);
PURE_ float ceil(float);
PURE_ float trunc(float);
PURE_ int max(int, int);
PURE_ float fmax(float, float);
PURE_ float fmin(float, float);
PURE_ float pow(float, float);
PURE_ float sin(float);
PURE_ float cos(float);
PURE_ float log(float);
PURE_ float log1p(float);
PURE_ float round(float);
PURE_ float exp(float);
PURE_ float expm1(float);
PURE_ float tanh(float);
PURE_ float erf(float);
PURE_ float8 convert_float8(uchar8);
PURE_ float8 convert_float8(char8);
PURE_ float8 convert_float8(int8);
BUILTIN_ float vload_half(size_t, const __global half *);
BUILTIN_ float vload_half(size_t, const __private half *);
BUILTIN_ void vstore_half(float, size_t, __global half *);
BUILTIN_ void vstore_half(float, size_t, __private half *);
BUILTIN_ float8 vload8(size_t, const __global float *);
BUILTIN_ float8 vload8(size_t, const __local float *);
BUILTIN_ uchar8 vload8(size_t, const __global uchar *);
BUILTIN_ void vstore8(float8, size_t, __global float *);
BUILTIN_ void vstore8(float8, size_t, __local float *);
BUILTIN_ void vstore8(float8, size_t, __private float *);
BUILTIN_ uint4 vload4(size_t, const __global uint *);
BUILTIN_ uint2 vload2(size_t, const __global uint *);
BUILTIN_ void vstore4(uint4, size_t, __global uint *);
BUILTIN_ void vstore2(uint2, size_t, __global uint *);
