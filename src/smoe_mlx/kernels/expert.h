  // out[pair, row] = sm_activation(up, gate) of rows of the expert in slot[pair], for one input row.
  // A slot that the bank does not have (say 0xffffffff: not in memory) gives 0 and reads nothing.
  //
  // inp     [tokens, K] if FIRST; else [pairs, K], each row in chunks, transposed: quad 0 of every
  //         chunk, quad 1, ...; pair = token * top-k + place
  // slot    [tokens, top-k]: numbers of slots, or with LOOKUP of experts, whose slots lookup [E] has
  // wu su bu au, wg sg bg ag: codes [slots, N, K * BITS / 32], scales and offsets of groups
  //         [slots, N, K / GROUP], bias [slots, N]; the second set only if GATED, bias only if BIAS
  // out     [pairs, N]; if FIRST each row in chunks of NEXT numbers, transposed as said above
  // grid: y = pair, x = block of rows; SIMDS simdgroups. LANES lanes share a row, each takes a chunk
  // of it at a time, and ROWS such rows, and reads AHEAD chunks ahead.
  constexpr int LOADS = 32 % BITS == 0 ? 1 : BITS;                  // of 16 bytes, in a chunk
  constexpr int CODES = 128 * LOADS / BITS;                         // in a chunk
  constexpr int QUADS = CODES / 4;                                  // a quad: four codes
  constexpr int CHUNKS = K / CODES;                                 // in a row
  constexpr int PARTS = CODES > GROUP ? CODES / GROUP : 1;          // groups in a chunk
  constexpr int PART = QUADS / PARTS;                               // quads of one group in a chunk
  constexpr int SPAN = GROUP > CODES ? GROUP / CODES : 1;           // chunks in a group
  constexpr int BESIDE = 32 / LANES;                                // rows side by side
  constexpr int STAGES = (K / 4 + SIMDS * 32 - 1) / (SIMDS * 32);   // quads of x for a thread
  SM_SHARED(float4, xs, QUADS * CHUNKS); // transposed, so that neighbouring lanes read neighbours
  SM_SHARED(float, xsum, PARTS * CHUNKS);

  const uint32_t input = FIRST ? sm_y / uint32_t(slot_shape[1]) : sm_y;
  const uint32_t number = uint32_t(slot[sm_y]);
  const uint32_t expert = LOOKUP ? uint32_t(lookup[number]) : number;
  const bool there = expert < uint32_t(wu_shape[0]);

  const uint32_t first = (sm_block * SIMDS + sm_simd) * uint32_t(BESIDE * ROWS) + sm_lane / LANES;
  const uint32_t lane = sm_lane % LANES;
  const SM_DEVICE uint4* wu4 = (const SM_DEVICE uint4*)wu;
  const SM_DEVICE uint4* wg4 = (const SM_DEVICE uint4*)wg;
  size_t line[ROWS];
  float up[ROWS];
  float gate[ROWS];
  SM_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const uint32_t row = first + uint32_t(r * BESIDE);
    line[r] = size_t(there ? expert : 0u) * uint32_t(N) + (row < uint32_t(N) ? row : 0u);
    up[r] = 0.0f;
    gate[r] = 0.0f;
  }
  // A queue of chunks: the last AHEAD of them are still on their way.
  sm_chunk<LOADS, PARTS> qu[AHEAD + 1][ROWS];
  sm_chunk<LOADS, PARTS> qg[AHEAD + 1][ROWS];
  SM_UNROLL
  for (int a = 0; a < AHEAD; a++) {
    const uint32_t c = uint32_t(a * LANES) + lane;
    SM_UNROLL
    for (int r = 0; r < ROWS; r++) {
      if (there && c < uint32_t(CHUNKS)) {
        sm_fetch<HOW, (1 << (BITS - 1)), CHUNKS, SPAN>(qu[a][r], wu4, su, bu, line[r], c);
        if (GATED) {
          sm_fetch<HOW, (1 << (BITS - 1)), CHUNKS, SPAN>(qg[a][r], wg4, sg, bg, line[r], c);
        }
      }
    }
  }

  float4 v[STAGES];
  SM_UNROLL
  for (int s = 0; s < STAGES; s++) {
    const uint32_t i = uint32_t(s * SIMDS * 32) + sm_thread;
    v[s] = SM_FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < uint32_t(K / 4)) {
      const uint32_t quad = FIRST ? i : i % uint32_t(QUADS) * uint32_t(CHUNKS) + i / uint32_t(QUADS);
      const size_t at = size_t(input) * uint32_t(K) + 4u * quad;
      v[s] = SM_FLOAT4(float(inp[at]), float(inp[at + 1]), float(inp[at + 2]), float(inp[at + 3]));
    }
  }
  SM_LOADED();
  SM_UNROLL
  for (int s = 0; s < STAGES; s++) {
    const uint32_t i = uint32_t(s * SIMDS * 32) + sm_thread;
    const float sum = sm_lane_sum<PART>((v[s].x + v[s].y) + (v[s].z + v[s].w));
    if (i < uint32_t(K / 4)) {
      const uint32_t c = 4u * (i % uint32_t(QUADS));
      xs[(i % uint32_t(QUADS)) * uint32_t(CHUNKS) + i / uint32_t(QUADS)] = SM_FLOAT4(
          (sm_place<BITS, HOW>(v[s].x, c)), (sm_place<BITS, HOW>(v[s].y, c + 1u)),
          (sm_place<BITS, HOW>(v[s].z, c + 2u)), (sm_place<BITS, HOW>(v[s].w, c + 3u)));
      if (i % uint32_t(PART) == 0u) {
        xsum[i / uint32_t(PART)] = sum;
      }
    }
  }
  SM_BARRIER();

  if (there) {
    SM_NO_UNROLL
    for (uint32_t start = 0u; start < uint32_t(CHUNKS); start += uint32_t(LANES)) {
      const uint32_t next = start + uint32_t(AHEAD * LANES) + lane;
      SM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        if (next < uint32_t(CHUNKS)) {
          sm_fetch<HOW, (1 << (BITS - 1)), CHUNKS, SPAN>(qu[AHEAD][r], wu4, su, bu, line[r], next);
          if (GATED) {
            sm_fetch<HOW, (1 << (BITS - 1)), CHUNKS, SPAN>(qg[AHEAD][r], wg4, sg, bg, line[r], next);
          }
        }
      }
      SM_LOADED();
      const uint32_t c = start + lane;
      if (c < uint32_t(CHUNKS)) {
        SM_UNROLL
        for (int p = 0; p < PARTS; p++) {
          float du[ROWS];
          float dg[ROWS];
          SM_UNROLL
          for (int r = 0; r < ROWS; r++) {
            du[r] = 0.0f;
            dg[r] = 0.0f;
          }
          SM_UNROLL
          for (int j = p * PART; j < (p + 1) * PART; j++) {
            const float4 x = xs[uint32_t(j * CHUNKS) + c];
            SM_UNROLL
            for (int r = 0; r < ROWS; r++) {
              du[r] += sm_dot4<BITS, HOW>(qu[0][r], j, x);
              if (GATED) {
                dg[r] += sm_dot4<BITS, HOW>(qg[0][r], j, x);
              }
            }
          }
          const float sum = xsum[c * uint32_t(PARTS) + uint32_t(p)];
          SM_UNROLL
          for (int r = 0; r < ROWS; r++) {
            up[r] += qu[0][r].scale[p] * du[r] + qu[0][r].offset[p] * sum;
            if (GATED) {
              gate[r] += qg[0][r].scale[p] * dg[r] + qg[0][r].offset[p] * sum;
            }
          }
        }
      }
      SM_UNROLL
      for (int a = 0; a < AHEAD; a++) {
        SM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          qu[a][r] = qu[a + 1][r];
          if (GATED) {
            qg[a][r] = qg[a + 1][r];
          }
        }
      }
    }
  }
  SM_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const uint32_t row = first + uint32_t(r * BESIDE);
    float u = sm_lane_sum<LANES>(up[r]);
    float g = GATED ? sm_lane_sum<LANES>(gate[r]) : 0.0f;
    if (lane == 0u && row < uint32_t(N)) {
      if (BIAS && there) {
        u += float(au[line[r]]);
        if (GATED) {
          g += float(ag[line[r]]);
        }
      }
      constexpr uint32_t C = NEXT;
      const uint32_t quad = row % C / 4u * (uint32_t(N) / C) + row / C;
      const uint32_t at = FIRST ? 4u * quad + row % 4u : row;
      out[size_t(sm_y) * uint32_t(N) + at] = static_cast<T>(there ? sm_activation(u, g) : 0.0f);
    }
  }
