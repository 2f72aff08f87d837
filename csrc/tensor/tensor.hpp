// The encoder and the decoder of whole tensors: the core as a library, with plain pointers and
// sizes, and no Python. bind/bind.cpp binds it; fuzz targets and thread tests use it directly.
#pragma once

#include "tensor/decode.hpp"
#include "tensor/encode.hpp"
