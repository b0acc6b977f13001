// main of a process that runs one kernel, once. The file argv[1] has sizes (grid, threadgroup, seed,
// limit, workers, whole blocks, number of buffers, bytes of each), then buffers, which are written
// back. Each is a heap block of exact size.
#pragma once
#include <cstdio>

int main(int, char** argv) {
  std::FILE* file = std::fopen(argv[1], "r+b");
  uint32_t n[11], grid[3], block[3];
  if (!file || std::fread(n, sizeof n, 1, file) != 1) return 2;
  for (int i = 0; i < 3; i++) grid[i] = n[i], block[i] = n[3 + i];
  const smemu::Options options{n[6], n[7], n[8], n[9]};
  std::vector<uint32_t> sizes(n[10]);
  std::vector<void*> buffers;
  if (std::fread(sizes.data(), 4, sizes.size(), file) != sizes.size()) return 2;
  const long start = std::ftell(file);
  for (uint32_t size : sizes) {
    buffers.push_back(std::malloc(size));
    if (std::fread(buffers.back(), 1, size, file) != size) return 2;
  }
  uint64_t seen[4];
  char message[512];
  smemu_launch(buffers.data(), grid, block, &options, seen, message, sizeof message);
  std::fseek(file, start, SEEK_SET);
  for (size_t i = 0; i < sizes.size(); i++) {
    std::fwrite(buffers[i], 1, sizes[i], file);
    std::free(buffers[i]);
  }
  return std::fclose(file);
}
