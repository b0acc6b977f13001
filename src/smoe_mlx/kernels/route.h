  // ids, scores [tokens, TOP_K]: a token's experts and their weights, from its logits [tokens, E].
  //
  // An expert's score is SIGMOID of its logit, or the root of its SOFTPLUS, else softmax over all; in
  // float if WIDE, else rounded to T. BY_LOGITS: choose by logits, else by scores, plus correction [E]
  // if BIASED, rounded to KEY. Of GROUPS, the experts of those DROP whose best two add up to least
  // count as 0, or with NEVER as -infinity; with GREEDY those whose best one is least, and their
  // scores are 0 then. Of equal ones the first is chosen, with LAST the last, and the order is then
  // ascending: what mlx-lm's argpartition does, which sorts on a GPU. NORM: weights are scores divided
  // by their sum plus EPS, or by LEAST. They are multiplied by SCALE (all three are a float's bits),
  // and become O.
  // grid: y = token; one simdgroup.
  constexpr int OWN = (E + 31) / 32; // experts of a lane: lane, lane + 32, ...
  constexpr bool ALONE = SIGMOID != 0 || SOFTPLUS != 0; // a score depends on no other logit
  const uint32_t start = sm_y * uint32_t(E);
  float most = -SM_INFINITY;
  float v[OWN];
  SM_UNROLL
  for (int j = 0; j < OWN; j++) {
    const uint32_t e = uint32_t(32 * j) + sm_lane;
    v[j] = e < uint32_t(E) ? float(logits[start + e]) : -SM_INFINITY;
    most = v[j] > most ? v[j] : most;
  }
  SM_UNROLL
  for (int m = 16; m > 0; m /= 2) {
    const float other = SM_SHUFFLE_XOR(most, m);
    most = other > most ? other : most;
  }
  float key[OWN];
  float total = 0.0f;
  SM_UNROLL
  for (int j = 0; j < OWN; j++) {
    key[j] = v[j];
    if (SIGMOID) {
      const uint32_t e = uint32_t(32 * j) + sm_lane;
      const float small = 1.0f / (1.0f + SM_EXP(v[j] < 0.0f ? -v[j] : v[j])); // as MLX computes it
      v[j] = e < uint32_t(E) ? (v[j] < 0.0f ? small : 1.0f - small) : 0.0f;
    } else if (SOFTPLUS) {
      const uint32_t e = uint32_t(32 * j) + sm_lane;
      v[j] = e < uint32_t(E) ? SM_SQRT(sm_softplus(v[j])) : 0.0f;
    } else {
      v[j] = SM_EXP(v[j] - most);
    }
    total += v[j];
  }
  SM_UNROLL
  for (int m = 16; m > 0; m /= 2) {
    total += SM_SHUFFLE_XOR(total, m);
  }
  uint32_t left = 0u; // bit j: expert j of this lane can still be chosen
  SM_UNROLL
  for (int j = 0; j < OWN; j++) {
    const uint32_t e = uint32_t(32 * j) + sm_lane;
    left |= e < uint32_t(E) ? 1u << j : 0u;
    if (!BY_LOGITS) {
      const float score = ALONE ? v[j] : v[j] / total;
      key[j] = WIDE ? score : float(static_cast<T>(score));
      if (BIASED && e < uint32_t(E)) {
        key[j] += float(static_cast<KEY>(float(correction[e])));
        key[j] = float(static_cast<KEY>(key[j]));
      }
    }
  }
  if (DROP > 0) {
    constexpr uint32_t SIZE = E / GROUPS;
    float mine = 0.0f; // the best of group sm_lane, or what its best two add up to
    SM_NO_UNROLL
    for (uint32_t g = 0u; g < uint32_t(GROUPS); g++) {
      float first = -SM_INFINITY;
      float second = -SM_INFINITY;
      SM_UNROLL
      for (int j = 0; j < OWN; j++) {
        if ((uint32_t(32 * j) + sm_lane) / SIZE == g) {
          second = key[j] > first ? first : key[j] > second ? key[j] : second;
          first = key[j] > first ? key[j] : first;
        }
      }
      SM_UNROLL
      for (int m = 16; m > 0; m /= 2) {
        const float other = SM_SHUFFLE_XOR(first, m);
        const float other_second = SM_SHUFFLE_XOR(second, m);
        const float low = other > first ? first : other;
        second = other_second > second ? other_second : second;
        second = low > second ? low : second;
        first = other > first ? other : first;
      }
      const float two = float(static_cast<KEY>(first + second));
      mine = sm_lane == g ? (GREEDY ? first : two) : mine;
    }
    uint32_t rank = 0u; // of group sm_lane
    SM_NO_UNROLL
    for (uint32_t g = 0u; g < uint32_t(GROUPS); g++) {
      const float other = SM_SHUFFLE(mine, g);
      rank += other < mine || (other == mine && g < sm_lane) ? 1u : 0u;
    }
    SM_UNROLL
    for (int j = 0; j < OWN; j++) {
      const uint32_t g = (uint32_t(32 * j) + sm_lane) / SIZE;
      if (SM_SHUFFLE(rank, g % 32u) < uint32_t(DROP)) {
        key[j] = NEVER ? -SM_INFINITY : 0.0f;
        v[j] = GREEDY ? 0.0f : v[j];
      }
    }
  }

  uint32_t my_id = 0u; // of the place sm_lane
  float my_score = 0.0f;
  float chosen = 0.0f;
  for (int k = 0; k < TOP_K; k++) {
    float best = -SM_INFINITY;
    uint32_t id = 0xffffffffu; // nothing: anything is better
    SM_UNROLL
    for (int j = 0; j < OWN; j++) {
      const bool better = id == 0xffffffffu || key[j] > best || (LAST && key[j] == best);
      if ((left >> j & 1u) && better) {
        best = key[j];
        id = uint32_t(32 * j) + sm_lane;
      }
    }
    SM_UNROLL
    for (int m = 16; m > 0; m /= 2) {
      const float other = SM_SHUFFLE_XOR(best, m);
      const uint32_t other_id = SM_SHUFFLE_XOR(id, m);
      const bool same = other == best && (LAST ? other_id > id : other_id < id);
      if (other_id != 0xffffffffu && (id == 0xffffffffu || other > best || same)) {
        best = other;
        id = other_id;
      }
    }
    // The first lane's, should NaN have made them differ.
    id = SM_SHUFFLE(id, 0);
    float score = 0.0f;
    SM_UNROLL
    for (int j = 0; j < OWN; j++) {
      if (uint32_t(32 * j) + sm_lane == id) {
        score = v[j];
        left &= ~(1u << j);
      }
    }
    score = SM_SHUFFLE(score, id % 32u);
    chosen += score;
    if (sm_lane == uint32_t(LAST ? TOP_K - 1 - k : k)) {
      my_id = id;
      my_score = score;
    }
  }
  const float all = sm_at_least(chosen + SM_AS_FLOAT(uint32_t(EPS)), SM_AS_FLOAT(uint32_t(LEAST)));
  float sum = NORM ? all : ALONE ? 1.0f : total;
  sum = total == total ? sum : total; // NaN stays NaN
  if (sm_lane < uint32_t(TOP_K)) {
    ids[sm_y * uint32_t(TOP_K) + sm_lane] = my_id;
    scores[sm_y * uint32_t(TOP_K) + sm_lane] =
        static_cast<O>(my_score / sum * SM_AS_FLOAT(uint32_t(SCALE)));
  }
