// Sums the rows of small fp32 matrices. A warp reads 32 neighbouring columns; 16 warps share the
// rows and add up in a fixed order.
#include "cuda/column_sum.h"

#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kColumns = 32, kRowLanes = 16;

struct Params {
  ColumnSum sums[kMaxColumnSums];  // one for each blockIdx.y
  int64_t rows, columns;
};

BU_KERNEL(kColumns* kRowLanes, 2) column_sum_kernel(BU_PARAMS Params p) {
  const ColumnSum& matrix = p.sums[blockIdx.y];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float sum[1] = {0.0f};
  if (column < p.columns) {
    for (int64_t row = threadIdx.y; row < p.rows; row += kRowLanes)
      sum[0] += load_global<float>(matrix.partials + row * p.columns + column);
  }
  sum_over_y(sum, 0);
  if (threadIdx.y == 0 && column < p.columns)
    store_parameter(matrix.out, matrix.out_dtype, column, sum[0]);
}

}  // namespace

void column_sums(const char* op, std::initializer_list<ColumnSum> sums, int64_t rows,
                 int64_t columns, cudaStream_t stream) {
  Params p{{}, rows, columns};
  unsigned count = 0;
  for (const ColumnSum& sum : sums)
    if (sum.out != nullptr) p.sums[count++] = sum;
  if (columns == 0 || count == 0) return;
  const dim3 grid(static_cast<unsigned>((columns + kColumns - 1) / kColumns), count);
  launch(op, column_sum_kernel, grid, dim3(kColumns, kRowLanes),
         sum_over_y_bytes(kColumns, kRowLanes, 1), stream, p);
}

}  // namespace bert_unpad::cuda
