// The balancer for bert_unpad/_balancer.py: gives examples to ranks and steps, and packs them into
// rows.
#include <memory>
#include <tuple>

#include "dealing.h"
#include "epoch_plan.h"
#include "host/c_interface.h"
#include "pack.h"

namespace bert_unpad::balancer {
namespace {

using host::Array;
using host::guarded;
using host::hand_over;
using host::Handle;
using host::held;

using Plan = std::unique_ptr<EpochPlan>;

const EpochPlan& plan_of(Handle* handle) { return *held<Plan>(handle); }

}  // namespace

BERT_UNPAD_API int bu_work(const WorkModel* model, double length, double* work) {
  return guarded([&] {
    model->validate();
    *work = (*model)(length);
  });
}

BERT_UNPAD_API int bu_work_for_hidden(int64_t hidden, WorkModel* model) {
  return guarded([&] { *model = WorkModel::for_hidden(hidden); });
}

// `lengths` must stay where they are as long as the plan.
BERT_UNPAD_API int bu_plan(const char* strategy, Array<uint16_t> lengths,
                           Array<uint32_t> population, const EpochOptions* options, Handle** plan,
                           int64_t* steps, int64_t* num_examples) {
  return guarded([&] {
    if (population.size == 0) {
      throw std::invalid_argument("population: expected at least one example, got none");
    }
    Plan made = make_epoch_plan(strategy, lengths.span(), population.span(), *options);
    *steps = made->steps();
    *num_examples = made->num_examples();
    *plan = host::hold(std::move(made));
  });
}

BERT_UNPAD_API int bu_plan_block(Handle* plan, int64_t step, int64_t* first, int64_t* last) {
  return guarded([&] { std::tie(*first, *last) = plan_of(plan).block(step); });
}

BERT_UNPAD_API int bu_plan_rank_steps(Handle* plan, int64_t rank, int64_t first, int64_t last,
                                      Handle** indices, Handle** ends) {
  return guarded([&] {
    std::vector<uint32_t> found;
    std::vector<int64_t> found_ends;
    plan_of(plan).rank_steps(rank, first, last, found, found_ends);
    *indices = hand_over(std::vector<int64_t>(found.begin(), found.end()));
    *ends = hand_over(std::move(found_ends));
  });
}

BERT_UNPAD_API int bu_plan_work(Handle* plan, int64_t first, int64_t last, Handle** work) {
  return guarded([&] { *work = hand_over(plan_of(plan).work(first, last)); });
}

BERT_UNPAD_API int bu_plan_received(Handle* plan, int64_t first, int64_t last, Handle** received) {
  return guarded([&] { *received = hand_over(plan_of(plan).received(first, last)); });
}

BERT_UNPAD_API int bu_plan_remaining(Handle* plan, int64_t done, Handle** examples) {
  return guarded([&] { *examples = hand_over(plan_of(plan).remaining(done)); });
}

// `max_sequences` below 0: no limit.
BERT_UNPAD_API int bu_pack_rows(Array<uint16_t> lengths, int64_t row_tokens, int64_t max_sequences,
                                int best_fit, uint64_t seed, Handle** indices, Handle** ends) {
  return guarded([&] {
    const Packing packing = best_fit ? Packing::kBestFit : Packing::kShortestFirst;
    Rows rows = pack(lengths.span(), row_tokens, max_sequences, packing, seed);
    *indices = hand_over(std::move(rows.indices));
    *ends = hand_over(std::move(rows.ends));
  });
}

BERT_UNPAD_API int bu_deal(Array<uint16_t> lengths, Array<int64_t> counts, const char* dealing,
                           int64_t group_ranks, const WorkModel* work, Array<double> speeds,
                           Handle** ranks) {
  return guarded([&] {
    Dealing how;
    if (!parse_dealing(dealing, how)) {
      throw std::invalid_argument(
          std::string("dealing: expected 'plain', 'snake', 'lpt' or 'greedy', got '") + dealing +
          "'");
    }
    *ranks =
        hand_over(deal_step(lengths.span(), counts.span(), group_ranks, how, *work, speeds.span()));
  });
}

}  // namespace bert_unpad::balancer
