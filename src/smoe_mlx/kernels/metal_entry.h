  const uint sm_lane = thread_index_in_simdgroup;
  const uint sm_simd = simdgroup_index_in_threadgroup;
  const uint sm_thread = thread_index_in_threadgroup;
  const uint sm_block = threadgroup_position_in_grid.x;
  const uint sm_y = threadgroup_position_in_grid.y;
