// The names of host functions: that of a kernel's is the name of its PTX.
//
// Kernels are local symbols, which dladdr() does not see, so the symbol table is read from the
// library's file.
#pragma once

#include <dlfcn.h>
#include <elf.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace bert_unpad::ptx {

class SymbolTable {
 public:
  explicit SymbolTable(const char* file) {
    std::ifstream in(file, std::ios::binary);
    const auto header = read<Elf64_Ehdr>(in, 0, 1).at(0);
    const auto sections = read<Elf64_Shdr>(in, header.e_shoff, header.e_shnum);
    for (const Elf64_Shdr& section : sections) {
      if (section.sh_type != SHT_SYMTAB) continue;
      const Elf64_Shdr& strings = sections.at(section.sh_link);
      const auto names = read<char>(in, strings.sh_offset, strings.sh_size);
      for (const Elf64_Sym& symbol :
           read<Elf64_Sym>(in, section.sh_offset, section.sh_size / sizeof(Elf64_Sym)))
        if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && symbol.st_shndx != SHN_UNDEF)
          names_.emplace(symbol.st_value, &names.at(symbol.st_name));
    }
  }

  const std::string* find(uint64_t offset) const {
    const auto found = names_.find(offset);
    return found == names_.end() ? nullptr : &found->second;
  }

 private:
  template <class T>
  static std::vector<T> read(std::ifstream& in, uint64_t offset, uint64_t count) {
    std::vector<T> values(count);
    in.seekg(static_cast<std::streamoff>(offset));
    in.read(reinterpret_cast<char*>(values.data()),
            static_cast<std::streamsize>(count * sizeof(T)));
    if (!in) throw std::runtime_error("the symbol table of a library cannot be read");
    return values;
  }

  std::unordered_map<uint64_t, std::string> names_;
};

// The mangled name of a function in a library that is loaded.
inline std::string symbol_name(const void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0) throw std::runtime_error("a kernel is in no library");
  static std::map<const void*, SymbolTable> tables;
  const auto [table, fresh] = tables.try_emplace(info.dli_fbase, info.dli_fname);
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(function) -
                                            static_cast<const char*>(info.dli_fbase));
  const std::string* name = table->second.find(offset);
  if (name == nullptr) throw std::runtime_error("a kernel has no symbol in its library");
  return *name;
}

}  // namespace bert_unpad::ptx
