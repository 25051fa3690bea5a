// A least-significant-digit radix sort of (id, token), 8 bits a pass: count the digits of each
// chunk, turn the counts into places, move. A warp takes a chunk in order, 32 ids at a time, and
// ranks equal digits by lane, so the sort is stable and its result depends on nothing but the ids.
//
// A batch has 10^4 to 10^5 tokens: that is microseconds in any sort, if it takes few launches. So
// the three tables are sorted side by side, and a vocabulary of 30,522 takes two passes.
#include "embedding/token_sort.h"

#include <algorithm>

#include "cuda/launch.h"
#include "embedding/token_ids.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr int kChunk = 512;       // tokens of a warp
constexpr int kSortWarps = 4;     // of a block
constexpr int kScanQuarters = 4;  // threads that share a digit's chunks
constexpr int kSearchThreads = 256;

struct SortPass {
  TokenIds tokens;
  int32_t* buffers[2];  // [tables][ids, order][count]; read and written in turns
  uint32_t* counts;     // [tables][chunks][digits]
  int pass, chunks;

  BU_HD int32_t* ids(int buffer, int table) const {
    return buffers[buffer] + 2 * table * tokens.count;
  }
  BU_HD int32_t* order(int buffer, int table) const { return ids(buffer, table) + tokens.count; }
};

// kMove = false: counts[chunk][digit] = how often the digit is in the chunk. kMove = true: counts
// are places, and the chunk's tokens go there.
template <bool kMove>
BU_KERNEL(32 * kSortWarps, 4)
token_digits_kernel(BU_PARAMS SortPass p) {
  const int table = blockIdx.y, warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const int chunk = blockIdx.x * kSortWarps + warp;
  if (chunk >= p.chunks) return;
  const uint32_t digits = warp * kDigits * 4;  // this warp's in shared memory
  uint32_t* counts = p.counts + (static_cast<int64_t>(table) * p.chunks + chunk) * kDigits;
  for (int d = lane; d < kDigits; d += 32)
    store_shared<uint32_t>(digits + 4 * d, kMove ? load_global<uint32_t>(counts + d) : 0);
  sync_warp();
  const int64_t begin = static_cast<int64_t>(chunk) * kChunk;
  for (int64_t first = begin; first < begin + kChunk && first < p.tokens.count; first += 32) {
    const int64_t i = first + lane;
    const bool inside = i < p.tokens.count;
    int32_t id = 0, token = 0;
    if (inside) {
      if (p.pass == 0) {
        id = static_cast<int32_t>(token_id(p.tokens, table, i));
        token = static_cast<int32_t>(i);
      } else {
        id = load_global<int32_t>(p.ids(1 - p.pass % 2, table) + i);
        token = load_global<int32_t>(p.order(1 - p.pass % 2, table) + i);
      }
    }
    const uint32_t digit =
        inside ? static_cast<uint32_t>(id) >> (p.pass * kDigitBits) & (kDigits - 1) : kDigits;
    uint32_t others = 0, rank = 0;  // lanes with the same digit, and those before this one
#pragma unroll
    for (uint32_t mask = 1; mask < 32; ++mask) {
      if (shuffle_xor(digit, static_cast<int>(mask)) == digit) {
        ++others;
        if ((lane ^ mask) < lane) ++rank;
      }
    }
    const uint32_t place = inside ? load_shared<uint32_t>(digits + 4 * digit) : 0;
    sync_warp();
    if (inside && rank == others) store_shared<uint32_t>(digits + 4 * digit, place + others + 1);
    sync_warp();
    if (kMove && inside) {
      store_global<int32_t>(p.ids(p.pass % 2, table) + place + rank, id);
      store_global<int32_t>(p.order(p.pass % 2, table) + place + rank, token);
    }
  }
  if constexpr (!kMove) {
    for (int d = lane; d < kDigits; d += 32)
      store_global<uint32_t>(counts + d, load_shared<uint32_t>(digits + 4 * d));
  }
}

// Counts become places: the sum of all counts of smaller digits, and of the same digit in chunks
// before. A block a table; threadIdx.y shares the chunks.
BU_KERNEL(kDigits* kScanQuarters, 1) token_places_kernel(BU_PARAMS SortPass p) {
  const uint32_t digit = threadIdx.x, quarter = threadIdx.y;
  uint32_t* counts = p.counts + static_cast<int64_t>(blockIdx.x) * p.chunks * kDigits + digit;
  const int share = (p.chunks + kScanQuarters - 1) / kScanQuarters;
  const int begin = static_cast<int>(quarter) * share;
  const int end = begin + share < p.chunks ? begin + share : p.chunks;
  uint32_t sum = 0;
  for (int c = begin; c < end; ++c) sum += load_global<uint32_t>(counts + c * kDigits);
  const auto quarters = [](uint32_t q, uint32_t d) { return 4 * (q * kDigits + d); };
  store_shared<uint32_t>(quarters(quarter, digit), sum);
  sync_block();
  uint32_t total = 0, before = 0;
#pragma unroll
  for (uint32_t q = 0; q < kScanQuarters; ++q) {
    const uint32_t x = load_shared<uint32_t>(quarters(q, digit));
    total += x;
    if (q < quarter) before += x;
  }
  // Inclusive sums over the digits by doubling, in two rows of shared memory in turns.
  uint32_t row = kScanQuarters;
  if (quarter == 0) store_shared<uint32_t>(quarters(row, digit), total);
  sync_block();
  for (uint32_t step = 1; step < kDigits; step *= 2) {
    uint32_t x = load_shared<uint32_t>(quarters(row, digit));
    if (digit >= step) x += load_shared<uint32_t>(quarters(row, digit - step));
    row = 2 * kScanQuarters + 1 - row;
    if (quarter == 0) store_shared<uint32_t>(quarters(row, digit), x);
    sync_block();
  }
  uint32_t place = load_shared<uint32_t>(quarters(row, digit)) - total + before;
  for (int c = begin; c < end; ++c) {
    const uint32_t count = load_global<uint32_t>(counts + c * kDigits);
    store_global<uint32_t>(counts + c * kDigits, place);
    place += count;
  }
}

struct Search {
  SortedTokens sorted;
  int32_t* first[kTables];
  int64_t entries[kTables];
  int64_t count;
};

// first[id] = how many tokens have a smaller one.
BU_KERNEL(kSearchThreads, 4) token_first_kernel(BU_PARAMS Search p) {
  const int table = blockIdx.y;
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kSearchThreads + threadIdx.x;
  if (id > p.entries[table]) return;
  int64_t low = 0, high = p.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (load_global<int32_t>(p.sorted.ids[table] + middle) < id)
      low = middle + 1;
    else
      high = middle;
  }
  store_global<int32_t>(p.first[table] + id, static_cast<int32_t>(low));
}

int chunks_of(const TokenIds& tokens) {
  return static_cast<int>((tokens.count + kChunk - 1) / kChunk);
}

int64_t most_entries(const TokenIds& tokens) {
  return std::max({tokens.entries[0], tokens.entries[1], tokens.entries[2]});
}

}  // namespace

int64_t token_sort_words(const TokenIds& tokens) {
  int64_t words = 2 * kTables * 2 * tokens.count + kTables * int64_t{chunks_of(tokens)} * kDigits;
  for (const int64_t entries : tokens.entries) words += entries + 1;
  return words;
}

SortedTokens sort_tokens(const char* op, const TokenIds& tokens, int32_t* space,
                         cudaStream_t stream) {
  const int64_t buffer = kTables * 2 * tokens.count;
  SortPass p{tokens,
             {space, space + buffer},
             reinterpret_cast<uint32_t*>(space + 2 * buffer),
             0,
             chunks_of(tokens)};
  int passes = 1;
  while ((most_entries(tokens) - 1) >> (passes * kDigitBits) > 0) ++passes;
  if (tokens.count > 0) {
    const dim3 grid(static_cast<unsigned>((p.chunks + kSortWarps - 1) / kSortWarps), kTables);
    constexpr size_t kShared = kSortWarps * kDigits * 4;
    for (; p.pass < passes; ++p.pass) {
      launch(op, token_digits_kernel<false>, grid, dim3(32 * kSortWarps), kShared, stream, p);
      launch(op, token_places_kernel, dim3(kTables), dim3(kDigits, kScanQuarters),
             (kScanQuarters + 2) * kDigits * 4, stream, p);
      launch(op, token_digits_kernel<true>, grid, dim3(32 * kSortWarps), kShared, stream, p);
    }
  }
  Search search{{}, {}, {}, tokens.count};
  int32_t* first = space + 2 * buffer + kTables * int64_t{p.chunks} * kDigits;
  for (int t = 0; t < kTables; ++t) {
    search.sorted.ids[t] = p.ids((passes - 1) % 2, t);
    search.sorted.order[t] = p.order((passes - 1) % 2, t);
    search.sorted.first[t] = search.first[t] = first;
    search.entries[t] = tokens.entries[t];
    first += tokens.entries[t] + 1;
  }
  const dim3 grid(static_cast<unsigned>(most_entries(tokens) / kSearchThreads + 1), kTables);
  launch(op, token_first_kernel, grid, dim3(kSearchThreads), 0, stream, search);
  return search.sorted;
}

}  // namespace bert_unpad::cuda
