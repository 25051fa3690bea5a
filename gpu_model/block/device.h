// The device that launchers believe to run on.
#pragma once

namespace bert_unpad::block_model {

struct Device {
  int multiprocessors = 4;
  int shared_bytes = 166912;  // per block, after opting in
  int major = 8, minor = 0;   // compute capability
};

inline Device device;

}  // namespace bert_unpad::block_model
