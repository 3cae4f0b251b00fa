# Untested: no machine with Homebrew has seen it. packaging/README.md says how it is meant to be used.
class Mlxspec < Formula
  desc "Local server for language models on Apple Silicon, built on MLX"
  homepage "https://github.com/ml-explore/mlx" # of what it is built on: mlxspec has no page of its own yet
  url "ARCHIVE" # packaging/formula writes both; the version is in the archive's name
  sha256 "SHA256"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma # MLX's wheels need macOS 14
  depends_on "python@3.13"

  # Homebrew would rewrite the names of the wheels' libraries, and there is no room for longer ones.
  preserve_rpath

  def install
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    # Wheels, not sources: MLX's holds the compiled Metal library.
    system libexec/"bin/python", "-m", "pip", "install", buildpath
    bin.install_symlink libexec/"bin/mlxspec"
    generate_completions_from_executable(bin/"mlxspec", shell_parameter_format: :typer)
  end

  def caveats
    "`mlxspec service install` has it there after each login; `brew services` does not know it."
  end

  test do
    assert_equal "mlxspec #{version}\n", shell_output("#{bin}/mlxspec --version")
  end
end
