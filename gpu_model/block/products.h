// What a warpgroup has given to wgmma and not yet waited for. Between the two its sums are NaN, and
// the tiles may be read at any time: the values at one that the seed decides on, the checks at
// both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "gpu_model/block/site.h"

namespace bert_unpad::block_model {

inline constexpr int kProductRows = 64, kProductColumns = 64, kProductDepth = 16;

// Of 128 lanes, as wgmma.h says: 32 of each, or 16 where there are 32 columns.
struct ProductSums {
  std::vector<float*> lanes;
  int columns;
  float value[kProductRows][kProductColumns];
  int group;  // the last product's

  // f(sum in a lane, value) for all of them.
  template <class F>
  void each(const F& f) {
    for (int row = 0; row < kProductRows; ++row) {
      for (int column = 0; column < columns; ++column) {
        float* const lane = lanes[row / 16 * 32 + row % 8 * 4 + column % 8 / 2];
        f(lane[4 * (column / 8) + row / 8 % 2 * 2 + column % 2], value[row][column]);
      }
    }
  }
  void take() {
    each([](float& sum, float& value) {
      value = sum;
      sum = std::numeric_limits<float>::quiet_NaN();
    });
  }
  void give() {
    each([](float& sum, float& value) { sum = value; });
  }
};

struct ProductOperand {
  void (*load)(ProductOperand&, const Site&);  // checks a tile and reads it; null: from registers
  int count;                                   // of m or n
  bool transposed;
  uint32_t tile;  // lower half of its descriptor
  float rows[kProductRows][kProductDepth];
};

struct Product {
  ProductSums* sums = nullptr;
  ProductOperand a, b;
  bool add = false, made = false;
  Site site;
  int group = 0;

  void make() {
    using Row = float __attribute__((vector_size(4 * kProductColumns)));  // GCC's and Clang's
    Row columns[kProductDepth];
    for (int k = 0; k < kProductDepth; ++k)
      for (int n = 0; n < kProductColumns; ++n) columns[k][n] = b.rows[n][k];
    for (auto& row : sums->value) {
      Row sum{};
      if (add) std::memcpy(&sum, row, sizeof(sum));
      for (int k = 0; k < kProductDepth; ++k) sum += a.rows[&row - sums->value][k] * columns[k];
      std::memcpy(row, &sum, sizeof(sum));
    }
    made = true;
  }
  void read_tiles() {
    for (ProductOperand* operand : {&a, &b})
      if (operand->load != nullptr) operand->load(*operand, site);
  }
};

class PendingProducts {
 public:
  bool fenced = false;  // since the last commit and the last wait

  void clear() {
    products_.clear();
    sums_.clear();
    groups_ = 0;
    fenced = false;
  }
  bool empty() const { return products_.empty(); }
  const Product& oldest() const { return *products_.front(); }
  // Whether a lane's sums, which are there, are still being made.
  bool holds(const float* there, unsigned lane) const {
    return std::any_of(sums_.begin(), sums_.end(),
                       [&](const auto& sums) { return sums->lanes[lane] == there; });
  }

  // `lanes`: where the 128 lanes hold their sums.
  void start(std::unique_ptr<Product> product, std::vector<float*> lanes, bool now) {
    const auto found =
        std::find_if(sums_.begin(), sums_.end(), [&](const auto& s) { return s->lanes == lanes; });
    if (found != sums_.end()) {
      product->sums = found->get();
    } else {
      sums_.push_back(std::make_unique<ProductSums>());
      product->sums = sums_.back().get();
      product->sums->lanes = std::move(lanes);
      product->sums->columns = product->b.count;
      product->sums->take();
    }
    product->sums->group = product->group = groups_;
    product->read_tiles();
    // In order: not before an earlier one.
    const bool first = products_.empty() || products_.back()->made;
    if (now && first) product->make();
    products_.push_back(std::move(product));
  }
  void commit() {
    ++groups_;
    fenced = false;
  }

  // Makes what is left of the products of all committed groups but the youngest `pending`.
  void wait(int pending) {
    const auto done = [&](int group) { return group + pending < groups_; };
    size_t count = 0;
    for (; count < products_.size() && done(products_[count]->group); ++count) {
      products_[count]->read_tiles();
      if (!products_[count]->made) products_[count]->make();
    }
    products_.erase(products_.begin(), products_.begin() + static_cast<std::ptrdiff_t>(count));
    std::erase_if(sums_, [&](const auto& sums) {
      if (done(sums->group)) sums->give();
      return done(sums->group);
    });
    fenced = false;
  }

 private:
  std::vector<std::unique_ptr<Product>> products_;  // oldest first
  std::vector<std::unique_ptr<ProductSums>> sums_;
  int groups_ = 0;  // committed so far
};

}  // namespace bert_unpad::block_model
