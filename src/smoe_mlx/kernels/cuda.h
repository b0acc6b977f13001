// CUDA, through mx.fast.cuda_kernel.
#define SM_FN __device__ __forceinline__
#define SM_DEVICE
#define SM_THREAD
#define SM_SHARED(type, name, count) __shared__ type name[count]
#define SM_FLOAT4(a, b, c, d) make_float4(a, b, c, d)
#define SM_AS_FLOAT(u) __uint_as_float(u)
#define SM_HALF_AS_FLOAT(u) __half2float(__ushort_as_half((unsigned short)(u)))
#define SM_BARRIER() __syncthreads()
#define SM_SHUFFLE(v, lane) __shfl_sync(0xffffffffu, v, lane)
#define SM_SHUFFLE_DOWN(v, d) __shfl_down_sync(0xffffffffu, v, d)
#define SM_SHUFFLE_XOR(v, m) __shfl_xor_sync(0xffffffffu, v, m)
#define SM_EXP(v) expf(v)
#define SM_TANH(v) tanhf(v)
#define SM_LOG(v) logf(v)
#define SM_SQRT(v) sqrtf(v)
// No load is moved past it (one by __ldg would be).
#define SM_LOADED() __syncwarp()
#define SM_UNROLL _Pragma("unroll")
#define SM_NO_UNROLL _Pragma("unroll 1")
