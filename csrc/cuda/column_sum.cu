// Sums the rows of a matrix, most often a small one of partial sums. A warp reads 32 neighbouring
// columns; 16 warps share the rows and add up in a fixed order.
#include "cuda/column_sum.h"

#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kColumns = 32, kRowLanes = 16;

struct Params {
  const void* x;
  void* out;
  DType out_dtype;
  int64_t rows, columns;
};

template <class T>
BU_KERNEL(kColumns* kRowLanes, 2)
column_sum_kernel(BU_PARAMS Params p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float sum[1] = {0.0f};
  if (column < p.columns) {
    for (int64_t row = threadIdx.y; row < p.rows; row += kRowLanes)
      sum[0] += to_float(load_global<T>(static_cast<const T*>(p.x) + row * p.columns + column));
  }
  sum_over_y(sum, 0);
  if (threadIdx.y == 0 && column < p.columns) store_parameter(p.out, p.out_dtype, column, sum[0]);
}

}  // namespace

void column_sum(const char* op, const void* x, DType dtype, int64_t rows, int64_t columns,
                void* out, DType out_dtype, cudaStream_t stream) {
  if (columns == 0) return;
  const dim3 grid(static_cast<unsigned>((columns + kColumns - 1) / kColumns));
  dispatch(dtype, [&]<class T>() {
    launch(op, column_sum_kernel<T>, grid, dim3(kColumns, kRowLanes),
           sum_over_y_bytes(kColumns, kRowLanes, 1), stream,
           Params{x, out, out_dtype, rows, columns});
  });
}

}  // namespace bert_unpad::cuda
