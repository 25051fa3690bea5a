// Python module bert_unpad._balancer: converts arrays, releases the GIL around the work. No PyTorch
// headers, so the module does not depend on the PyTorch version.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dealing.h"
#include "epoch_plan.h"
#include "pack.h"

namespace py = pybind11;

namespace bert_unpad::balancer {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> view(const py::array& array, const char* name, const char* expected) {
  if (!py::isinstance<Array<T>>(array) || array.ndim() != 1) {
    throw py::type_error(std::string(name) + ": expected a contiguous one-dimensional array of " +
                         expected);
  }
  return {static_cast<const T*>(array.data()), static_cast<size_t>(array.size())};
}

// Hands a vector's memory to numpy without copying it.
template <typename T>
py::array_t<T> to_numpy(std::vector<T>&& values, std::vector<py::ssize_t> shape) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owned->data();
  py::capsule owner(owned.release(), [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(std::move(shape), data, owner);
}

template <typename T>
py::array_t<T> to_numpy(std::vector<T>&& values) {
  const auto size = static_cast<py::ssize_t>(values.size());
  return to_numpy(std::move(values), {size});
}

// An epoch plan together with the array of lengths that it reads.
class PyEpochPlan {
 public:
  PyEpochPlan(py::array lengths, const std::string& strategy, std::optional<py::array> population,
              const EpochOptions& options)
      : lengths_(std::move(lengths)), num_replicas_(options.num_replicas) {
    const auto lengths_view = view<uint16_t>(lengths_, "lengths", "uint16");
    std::span<const uint32_t> population_view;
    if (population) {
      population_view = view<uint32_t>(*population, "population", "uint32");
      if (population_view.empty()) {
        throw std::invalid_argument("population: expected at least one example, got none");
      }
    }
    py::gil_scoped_release release;
    plan_ = make_epoch_plan(strategy, lengths_view, population_view, options);
  }

  int64_t steps() const { return plan_->steps(); }
  int64_t num_examples() const { return plan_->num_examples(); }
  std::pair<int64_t, int64_t> block(int64_t step) const { return plan_->block(step); }

  py::tuple rank_steps(int64_t rank, int64_t first, int64_t last) const {
    std::vector<int64_t> indices;
    std::vector<int64_t> ends;
    {
      py::gil_scoped_release release;
      std::vector<uint32_t> narrow;
      plan_->rank_steps(rank, first, last, narrow, ends);
      indices.assign(narrow.begin(), narrow.end());
    }
    return py::make_tuple(to_numpy(std::move(indices)), to_numpy(std::move(ends)));
  }

  py::array_t<double> work(int64_t first, int64_t last) const {
    std::vector<double> result;
    {
      py::gil_scoped_release release;
      result = plan_->work(first, last);
    }
    return to_numpy(std::move(result), {last - first, num_replicas_});
  }

  py::array_t<int64_t> received(int64_t first, int64_t last) const {
    std::vector<int64_t> result;
    {
      py::gil_scoped_release release;
      result = plan_->received(first, last);
    }
    return to_numpy(std::move(result), {last - first, num_replicas_, 2, 2});
  }

  py::array_t<uint32_t> remaining(int64_t done) const {
    std::vector<uint32_t> result;
    {
      py::gil_scoped_release release;
      result = plan_->remaining(done);
    }
    return to_numpy(std::move(result));
  }

 private:
  py::array lengths_;
  int64_t num_replicas_;
  std::unique_ptr<EpochPlan> plan_;
};

py::tuple pack_py(const py::array& lengths, int64_t row_tokens,
                  std::optional<int64_t> max_sequences, const std::string& method, uint64_t seed) {
  const auto lengths_view = view<uint16_t>(lengths, "lengths", "uint16");
  if (method != "best_fit" && method != "shortest_first") {
    throw std::invalid_argument("method: expected 'best_fit' or 'shortest_first', got '" + method +
                                "'");
  }
  Rows rows;
  {
    py::gil_scoped_release release;
    rows = pack(lengths_view, row_tokens, max_sequences.value_or(row_tokens),
                method == "best_fit" ? Packing::kBestFit : Packing::kShortestFirst, seed);
  }
  return py::make_tuple(to_numpy(std::move(rows.indices)), to_numpy(std::move(rows.ends)));
}

py::array_t<int64_t> deal_py(const py::array& lengths, const py::array& counts,
                             const std::string& dealing, int64_t group_ranks, const WorkModel& work,
                             const std::optional<py::array>& speeds) {
  const auto lengths_view = view<uint16_t>(lengths, "lengths", "uint16");
  const auto counts_view = view<int64_t>(counts, "counts", "int64");
  std::span<const double> speeds_view;
  if (speeds) speeds_view = view<double>(*speeds, "speeds", "float64");
  Dealing how;
  if (!parse_dealing(dealing, how)) {
    throw std::invalid_argument("dealing: expected 'plain', 'snake', 'lpt' or 'greedy', got '" +
                                dealing + "'");
  }
  std::vector<int64_t> ranks;
  {
    py::gil_scoped_release release;
    ranks = deal_step(lengths_view, counts_view, group_ranks, how, work, speeds_view);
  }
  return to_numpy(std::move(ranks));
}

constexpr char kWorkModelDoc[] = R"(Work of a sequence of length s: linear * s + quadratic * s**2.

The unit is free, only ratios matter. ValueError if negative, not finite or both 0.)";

constexpr char kForHiddenDoc[] = R"(FLOPs of one forward Transformer layer of this hidden size.

24 * hidden**2 a token in the linear layers (intermediate size 4 * hidden) and 4 * s * hidden a
token in attention.)";

constexpr char kEpochPlanDoc[] = R"(Which examples each rank gets in each step of one epoch.

A pure function of the arguments, the same on every rank. lengths: uint16 [N], kept by reference:
do not change it afterwards. population: uint32, ascending, the examples to use; None means
all. ValueError or TypeError names the bad argument.)";

constexpr char kBlockDoc[] = R"((first, last): the steps that are computed together with this one.

Asking for whole blocks is cheapest.)";

constexpr char kRankStepsDoc[] = R"((indices, ends) of one rank in steps [first, last).

indices: int64, the examples, longest first in each step. ends: int64 [last - first], where each
step ends in indices.)";

constexpr char kWorkDoc[] = R"(Work of every rank in steps [first, last).

float64 [last - first, num_replicas], in the work model's unit.)";

constexpr char kReceivedDoc[] = R"(What every rank receives from others in steps [first, last).

int64 [last - first, num_replicas, 2, 2]: from its exchange_ranks neighbours and from farther ranks;
examples and tokens. All 0 for strategies that exchange nothing.)";

constexpr char kRemainingDoc[] =
    R"(The examples of the plan that no rank has met after the first done steps.

uint32, ascending.)";

constexpr char kPackDoc[] = R"(Packs sequences into rows of row_tokens tokens, longest first.

lengths: uint16 [N], 1 to row_tokens. max_sequences: most in a row, None for no limit. method:
"best_fit" puts a sequence into the row with the least space that is enough, "shortest_first" into
the one with the most. The order of rows and of sequences of one length is drawn from the seed.
Returns (indices, ends): uint32 [N], row after row; int64 [rows], where each row ends in indices.
ValueError or TypeError names the bad argument. Method: Krell et al., "Efficient Sequence Packing
without Cross-contamination" (2021).)";

constexpr char kDealDoc[] =
    R"(Deals the examples that all ranks have read for one step out among them.

lengths: uint16 [N], all examples, rank after rank. counts: int64 [ranks], how many each rank has.
dealing: "plain" (longest first, round after round), "snake" (every second round backwards), "lpt"
(each to the rank with the least work so far that has a place left; Graham, 1969), which all give
ranks of a group equally many examples, but for one; "greedy" (lpt without places) does not.
group_ranks: examples stay within groups of so many neighbouring ranks. speeds: float64 [ranks], with
"greedy": each example goes to the rank that would be done with it first; None where all are alike.
Returns int64 [N], the rank that gets each example. A pure function, the same on every rank.
ValueError or TypeError names the bad argument.)";

}  // namespace

PYBIND11_MODULE(_balancer, m) {
  m.doc() =
      "The balancer of bert_unpad: gives examples to ranks and steps, and packs them into rows.";

  py::class_<WorkModel>(m, "WorkModel", kWorkModelDoc)
      .def(py::init([](double linear, double quadratic) {
             const WorkModel model{linear, quadratic};
             model.validate();
             return model;
           }),
           py::arg("linear"), py::arg("quadratic"))
      .def_static("for_hidden", &WorkModel::for_hidden, py::arg("hidden") = 1024, kForHiddenDoc)
      .def_readonly("linear", &WorkModel::linear)
      .def_readonly("quadratic", &WorkModel::quadratic)
      .def("__call__", &WorkModel::operator(), py::arg("length"));

  py::class_<PyEpochPlan>(m, "EpochPlan", kEpochPlanDoc)
      .def(py::init([](py::array lengths, const std::string& strategy, int64_t num_replicas,
                       int64_t batch_size, uint64_t seed, uint64_t epoch, uint64_t segment,
                       const WorkModel& work, int64_t pool_steps, int64_t exchange_ranks,
                       std::optional<py::array> population) {
             return std::make_unique<PyEpochPlan>(
                 std::move(lengths), strategy, std::move(population),
                 EpochOptions{num_replicas, batch_size, seed, epoch, segment, work, pool_steps,
                              exchange_ranks});
           }),
           py::arg("lengths"), py::kw_only(), py::arg("strategy"), py::arg("num_replicas"),
           py::arg("batch_size"), py::arg("seed"), py::arg("epoch"), py::arg("segment") = 0,
           py::arg("work"), py::arg("pool_steps"), py::arg("exchange_ranks") = 8,
           py::arg("population") = py::none())
      .def_property_readonly("steps", &PyEpochPlan::steps,
                             "Number of steps, the same on all ranks.")
      .def_property_readonly("num_examples", &PyEpochPlan::num_examples)
      .def("block", &PyEpochPlan::block, py::arg("step"), kBlockDoc)
      .def("rank_steps", &PyEpochPlan::rank_steps, py::arg("rank"), py::arg("first"),
           py::arg("last"), kRankStepsDoc)
      .def("work", &PyEpochPlan::work, py::arg("first"), py::arg("last"), kWorkDoc)
      .def("received", &PyEpochPlan::received, py::arg("first"), py::arg("last"), kReceivedDoc)
      .def("remaining", &PyEpochPlan::remaining, py::arg("done"), kRemainingDoc);

  m.def("pack", &pack_py, py::arg("lengths"), py::arg("row_tokens") = 512, py::kw_only(),
        py::arg("max_sequences") = py::none(), py::arg("method") = "best_fit", py::arg("seed") = 0,
        kPackDoc);
  m.def("deal", &deal_py, py::arg("lengths"), py::arg("counts"), py::kw_only(), py::arg("dealing"),
        py::arg("group_ranks"), py::arg("work"), py::arg("speeds") = py::none(), kDealDoc);
}

}  // namespace bert_unpad::balancer
