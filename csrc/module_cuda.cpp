// The Python module object of bert_unpad._C_cuda. Importing it registers the CUDA operators (static
// initialisers of the other files). Its functions tell what was built, for `bert_unpad.info`, and
// say how algorithms of matrix products are chosen.
#include <Python.h>
#include <cuda_runtime_api.h>

#include <exception>

#include "linear/algorithms.h"

// The macro holds the bare list, commas included.
#define BU_STRINGIFY_TEXT(...) #__VA_ARGS__
#define BU_STRINGIFY(...) BU_STRINGIFY_TEXT(__VA_ARGS__)

namespace {

PyObject* archs(PyObject*, PyObject*) {
  return PyUnicode_FromString(BU_STRINGIFY(BERT_UNPAD_CUDA_ARCHS));
}

PyObject* cuda_version(PyObject*, PyObject*) {
  return PyUnicode_FromFormat("%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

PyObject* set_linear_timing(PyObject*, PyObject* arguments) {
  int enabled = 0;
  const char* path = nullptr;
  if (PyArg_ParseTuple(arguments, "ps", &enabled, &path) == 0) return nullptr;
  try {
    bert_unpad::cuda::set_timing(enabled != 0, path);
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"archs", archs, METH_NOARGS, "Comma-separated CUDA architectures in this build."},
    {"cuda_version", cuda_version, METH_NOARGS, "Version of the CUDA Toolkit that built this."},
    {"set_linear_timing", set_linear_timing, METH_VARARGS,
     "(enabled, path): whether cuBLASLt's algorithms are timed, once for each kind of product, and "
     "the file that keeps the best; an empty path: none."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                          "_C_cuda",
                          "CUDA operators of bert_unpad.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cuda() {
  return PyModule_Create(&module_def);
}
