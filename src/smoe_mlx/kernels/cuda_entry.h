  const uint32_t sm_lane = threadIdx.x & 31u;
  const uint32_t sm_simd = threadIdx.x >> 5;
  const uint32_t sm_thread = threadIdx.x;
  const uint32_t sm_block = blockIdx.x;
  const uint32_t sm_y = blockIdx.y;
