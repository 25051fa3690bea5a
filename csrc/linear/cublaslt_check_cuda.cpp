// Compares the numbers and layouts in cublaslt.h with NVIDIA's header, where that is installed.
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>

#include "linear/cublaslt.h"

namespace bert_unpad::cublaslt {

#define BU_SAME(ours, theirs) \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs))

BU_SAME(kSuccess, CUBLAS_STATUS_SUCCESS);
BU_SAME(kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
BU_SAME(kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
BU_SAME(DataType::kFloat32, CUDA_R_32F);
BU_SAME(DataType::kFloat16, CUDA_R_16F);
BU_SAME(DataType::kBFloat16, CUDA_R_16BF);
BU_SAME(DataType::kE4M3, CUDA_R_8F_E4M3);
BU_SAME(DataType::kE5M2, CUDA_R_8F_E5M2);
BU_SAME(ComputeType::kFloat32, CUBLAS_COMPUTE_32F);
BU_SAME(Operation::kNone, CUBLAS_OP_N);
BU_SAME(Operation::kTranspose, CUBLAS_OP_T);
BU_SAME(Epilogue::kNone, CUBLASLT_EPILOGUE_DEFAULT);
BU_SAME(Epilogue::kBias, CUBLASLT_EPILOGUE_BIAS);
BU_SAME(Epilogue::kGeluAuxBias, CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
BU_SAME(Epilogue::kDGelu, CUBLASLT_EPILOGUE_DGELU);
BU_SAME(Epilogue::kBiasGradientB, CUBLASLT_EPILOGUE_BGRADB);
BU_SAME(DescAttribute::kTransposeA, CUBLASLT_MATMUL_DESC_TRANSA);
BU_SAME(DescAttribute::kTransposeB, CUBLASLT_MATMUL_DESC_TRANSB);
BU_SAME(DescAttribute::kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
BU_SAME(DescAttribute::kBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
BU_SAME(DescAttribute::kAuxPointer, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
BU_SAME(DescAttribute::kAuxLd, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
BU_SAME(DescAttribute::kScaleA, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
BU_SAME(DescAttribute::kScaleB, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
BU_SAME(DescAttribute::kAuxType, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE);
BU_SAME(DescAttribute::kFastAccumulation, CUBLASLT_MATMUL_DESC_FAST_ACCUM);
BU_SAME(DescAttribute::kBiasType, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
BU_SAME(LayoutAttribute::kRows, CUBLASLT_MATRIX_LAYOUT_ROWS);
BU_SAME(LayoutAttribute::kCols, CUBLASLT_MATRIX_LAYOUT_COLS);
BU_SAME(LayoutAttribute::kLd, CUBLASLT_MATRIX_LAYOUT_LD);
BU_SAME(PreferenceAttribute::kMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
BU_SAME(PreferenceAttribute::kReductionSchemes, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
BU_SAME(PreferenceAttribute::kAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
BU_SAME(PreferenceAttribute::kAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
BU_SAME(PreferenceAttribute::kAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
BU_SAME(PreferenceAttribute::kAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
BU_SAME(kReproducibleReductions,
        CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
BU_SAME(sizeof(Algorithm), sizeof(cublasLtMatmulAlgo_t));
BU_SAME(sizeof(Heuristic), sizeof(cublasLtMatmulHeuristicResult_t));
BU_SAME(offsetof(Heuristic, workspace_bytes),
        offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
BU_SAME(offsetof(Heuristic, state), offsetof(cublasLtMatmulHeuristicResult_t, state));

#undef BU_SAME

}  // namespace bert_unpad::cublaslt
#endif
