// The Python module object of bert_unpad._C. Importing it registers the operators (static
// initialisers of the other files). Its functions tell what was built, for `bert_unpad.info`.
#include <Python.h>

#include <exception>

#include "cpu/isa.h"

// Programs without Python load this library for its operators (bert_unpad/include), and then these
// have no addresses; nothing calls them there.
#pragma weak PyBool_FromLong
#pragma weak PyErr_SetString
#pragma weak PyExc_RuntimeError
#pragma weak PyModule_Create2
#pragma weak PyUnicode_FromString

namespace {

PyObject* cpu_isa(PyObject*, PyObject*) {
  try {
    return PyUnicode_FromString(bert_unpad::isa_name(bert_unpad::isa()));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* built_isas(PyObject*, PyObject*) {
  return PyUnicode_FromString(bert_unpad::built_isas().c_str());
}

PyObject* fast_bf16_dot_products(PyObject*, PyObject*) {
  return PyBool_FromLong(bert_unpad::fast_bf16_dot_products());
}

PyObject* mkl_leaves_avx512_unused(PyObject*, PyObject*) {
  return PyBool_FromLong(bert_unpad::mkl_leaves_avx512_unused());
}

PyMethodDef methods[] = {
    {"cpu_isa", cpu_isa, METH_NOARGS, "Name of the CPU instruction set the operators use here."},
    {"built_isas", built_isas, METH_NOARGS, "Comma-separated instruction sets in this build."},
    {"fast_bf16_dot_products", fast_bf16_dot_products, METH_NOARGS,
     "Whether bf16 dot products are faster here than fp32 arithmetic."},
    {"mkl_leaves_avx512_unused", mkl_leaves_avx512_unused, METH_NOARGS,
     "Whether this CPU has AVX-512 that MKL does not use."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                          "_C",
                          "CPU operators of bert_unpad.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  return PyModule_Create(&module_def);
}
