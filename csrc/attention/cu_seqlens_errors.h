// What can be wrong with a cu_seqlens, in the same words on every device;
// bert_unpad/batch/varlen.py uses them too. They follow the tensor's name; the numbers come after
// them where the host knows them.
#pragma once

#define BU_CU_SEQLENS_START "must start with 0"
#define BU_CU_SEQLENS_ORDER "must not decrease"
#define BU_CU_SEQLENS_END "must end at the number of tokens"
#define BU_CU_SEQLENS_LONGEST "must hold no sequence longer than max_seqlen"
#define BU_ORDER_ROW "order must hold sequence, first token, length and 0"
